"""Random trees, the drawn example, poisoned buffers and oracles for kernel tests.

Kernels run on ``DEVICE``, their plain twins on CPU copies of the same tensors, and
everything a kernel has to write starts out as garbage.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from vllm_mtp.buffers import TreeBuffers, build_tree_buffers
from vllm_mtp.config import TreeShape
from vllm_mtp.tree.layout import NO_PARENT, PackedTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

POISON = 0x5A5A5A
"""Written wherever an integer result is due: no valid token, row or candidate."""


def poisoned_buffers(
    shape: TreeShape, num_reqs: int, num_tokens: int = 64, device: str = DEVICE
) -> TreeBuffers:
    """Buffers of garbage: NaN in floats, ``POISON`` in integers, no chain requests."""
    buffers = build_tree_buffers(shape, num_reqs, num_tokens, torch.device(device))
    for tensor in _tensors(buffers).values():
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(POISON)
    return buffers


def copy_buffers(buffers: TreeBuffers, device: str = "cpu") -> TreeBuffers:
    """An independent copy, for the twin."""
    copies = {k: v.clone().to(device) for k, v in _tensors(buffers).items()}
    return dataclasses.replace(buffers, **copies)


def assert_same_buffers(found: TreeBuffers, expected: TreeBuffers) -> None:
    """Every tensor is equal to the last bit; NaN equals NaN."""
    for name, tensor in _tensors(expected).items():
        assert_same(getattr(found, name), tensor, name)


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Equal to the last bit; NaN equals NaN."""
    torch.testing.assert_close(
        found.cpu(),
        expected.cpu(),
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def _tensors(buffers: TreeBuffers) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(buffers).items() if isinstance(v, torch.Tensor)}


def random_tree(rng: np.random.Generator, num_rows: int, alphabet: int) -> PackedTree:
    """A tree whose parents come first; few token ids, so siblings may be equal."""
    parents = [NO_PARENT, *(int(rng.integers(0, row)) for row in range(1, num_rows))]
    tokens = tuple(int(t) for t in rng.integers(0, alphabet, num_rows))
    return PackedTree(tokens=tokens, parents=tuple(parents))


def chain_tree(num_rows: int) -> PackedTree:
    """Row ``i`` below row ``i - 1``."""
    return PackedTree(
        tokens=tuple(range(num_rows)), parents=tuple(range(-1, num_rows - 1))
    )


def star_tree(num_rows: int) -> PackedTree:
    """Every row below the root."""
    return PackedTree(
        tokens=tuple(range(num_rows)), parents=(NO_PARENT, *([0] * (num_rows - 1)))
    )


def store_tree(buffers: TreeBuffers, slot: int, tree: PackedTree) -> None:
    """Put a tree of exactly ``1 + N`` rows into the by-slot tensors."""
    device = buffers.parents.device
    buffers.parents[slot] = torch.tensor(tree.parents, device=device)
    buffers.depths[slot] = torch.tensor(tree.depths, device=device)
    masks = [to_signed(mask) for mask in tree.masks]
    buffers.masks[slot] = torch.tensor(masks, device=device)


def to_signed(bits: int) -> int:
    """64 bits as the int64 that has them."""
    return bits - (1 << 64) if bits >> 63 else bits


def walk_oracle(
    parents: Sequence[int], drafted: Sequence[int], sampled: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(accepted rows, emitted tokens) by looking at every row on its own.

    A row is correct when its parent is and it carries the token drawn there, and it is
    taken when no lower sibling is correct. Knows nothing of walking.
    """
    correct = [True]
    for row in range(1, len(drafted)):
        parent = parents[row]
        correct.append(
            parent >= 0
            and drafted[row] >= 0
            and correct[parent]
            and drafted[row] == sampled[parent]
        )
        lower = range(1, row)
        if any(correct[i] and parents[i] == parent for i in lower):
            correct[row] = False
    path = [row for row, ok in enumerate(correct) if ok]
    return path, [sampled[row] for row in path]


def target_noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """The target's Gumbel noise in plain numpy: murmur3 of seed, position and token.

    An independent statement of ``vllm/v1/worker/gpu/sample/gumbel.py`` (0.32), exact
    to about 1e-6.
    """
    with np.errstate(over="ignore"):
        keys = tokens.cpu().numpy().astype(np.uint32)
        h = np.zeros_like(keys)
        for word in (seed, seed >> 32, position):
            h = _murmur3_mix(h, np.full_like(keys, word & 0xFFFFFFFF))
        h = _murmur3_mix(h, keys) ^ np.uint32(16)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    uniform = (h.astype(np.float64) + 0.5) * 2.0**-32
    noise = -np.log(-np.log1p(-uniform.astype(np.float32).astype(np.float64)))
    return torch.from_numpy(noise.astype(np.float32))


def _murmur3_mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = _rotate(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotate(value: np.ndarray, shift: int) -> np.ndarray:
    return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))
