"""Reranking and packing, against the twin and against counting."""

import numpy as np
import pytest
import torch

from tests.helpers.trees import (
    DEVICE,
    POISON,
    assert_same,
    assert_same_buffers,
    copy_buffers,
    poisoned_buffers,
    to_signed,
)
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels.tree_pack import pack_tree
from vllm_mtp.reference.tree_expand import expand_tree as plain_expand
from vllm_mtp.reference.tree_pack import pack_tree as plain_pack
from vllm_mtp.tree.layout import EXAMPLE, PackedTree

SHAPES = [
    TreeShape(1, 1, 1),
    TreeShape(4, 1, 4),
    TreeShape(1, 7, 7),
    TreeShape(3, 4, 7),
    TreeShape(5, 8, 63),
    TreeShape(16, 4, 63),
    TreeShape(3, 32, 63),
    TreeShape(6, 3, 7, 1),
    TreeShape(6, 4, 12, 2),
]


def draw_candidates(shape, num_reqs, seed, steps):
    """Buffers after expansion with few distinct scores, made by the twin on the CPU."""
    rng = np.random.default_rng(seed)
    buffers = poisoned_buffers(shape, num_reqs, device="cpu")
    idx_mapping = torch.arange(num_reqs)
    hidden = torch.zeros(num_reqs * shape.topk, 1)
    input_ids = torch.zeros(num_reqs * shape.topk, dtype=torch.int32)
    for depth in range(1, shape.num_steps + 1):
        rows = buffers.topk_ids.shape
        buffers.topk_ids.copy_(torch.from_numpy(rng.integers(0, 1000, rows)))
        logprobs = torch.from_numpy(rng.choice(np.float32(steps), rows))
        buffers.topk_logprobs.copy_(logprobs.sort(dim=1, descending=True).values)
        plain_expand(buffers, depth, idx_mapping, hidden, hidden.clone(), input_ids)
    return buffers


def check(plain_buffers, slots):
    """Pack with kernel and twin; returns (buffers, draft tokens) of the kernel."""
    shape = plain_buffers.shape
    buffers = copy_buffers(plain_buffers, DEVICE)
    drafts = torch.full((len(slots) + 1, shape.num_nodes + 2), POISON, device=DEVICE)
    plain_drafts = drafts.clone().cpu()
    idx_mapping = torch.tensor(slots, device=DEVICE)
    pack_tree(buffers, idx_mapping, drafts[:, 1:-1])
    plain_pack(plain_buffers, idx_mapping.cpu(), plain_drafts[:, 1:-1])
    assert_same_buffers(buffers, plain_buffers)
    assert_same(drafts, plain_drafts, "draft_tokens")
    return buffers, drafts


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"S{s.num_steps}k{s.topk}F{s.frontier}"
)
@pytest.mark.parametrize("steps", [(0.0,), (-0.5, -1.0), (-1.0, -1.25, float("-inf"))])
def test_agrees_with_twin(shape, steps):
    """Catches: unstable ties, a child before its parent, depth or mask cut off."""
    check(draw_candidates(shape, 2, 0, steps), slots=[1, 0])


@pytest.mark.parametrize("seed", range(4))
def test_packed_tensors_by_counting(seed):
    """Catches: twin and kernel wrong in the same way; checks against PackedTree."""
    shape = TreeShape(4, 3, 12)
    buffers, drafts = check(draw_candidates(shape, 1, seed, (-0.5, -1.0)), slots=[0])
    parents = buffers.parents[0].tolist()
    tree = PackedTree(tokens=(0, *drafts[0, 1:-1].tolist()), parents=tuple(parents))
    assert all(parent < row for row, parent in enumerate(parents))
    assert buffers.depths[0].tolist() == list(tree.depths)
    assert buffers.masks[0].tolist() == [to_signed(mask) for mask in tree.masks]
    scores = buffers.scores[0].tolist()
    assert scores == sorted(scores, reverse=True)


def test_example():
    """Catches: any change of what the docs draw."""
    # a and b below the root, d and e below a, f below b, then g below d, h below f.
    shape = TreeShape(3, 2, 6)
    plain = poisoned_buffers(shape, 1, device="cpu")
    plain.cand_tokens[0] = torch.tensor([101, 102, 103, 104, 105, 8, 106, 9, 7, 6])
    plain.cand_parents[0] = torch.tensor([-1, -1, 0, 0, 1, 1, 2, 2, 4, 4])
    plain.cand_scores[0] = -torch.tensor([1, 2, 3, 4, 5, 9, 6, 9, 9, 9]).float()
    buffers, drafts = check(plain, slots=[0])
    assert (0, *drafts[0, 1:-1].tolist())[1:] == EXAMPLE.tokens[1:]
    assert buffers.parents[0].tolist() == list(EXAMPLE.parents)
    assert buffers.depths[0].tolist() == list(EXAMPLE.depths)
    assert buffers.masks[0].tolist() == list(EXAMPLE.masks)


def test_chain_of_padding():
    """Catches: padding hung below a node, or depth 0 for it."""
    shape = TreeShape(3, 2, 6)
    plain = draw_candidates(shape, 1, 0, (-1.0,))
    plain.cand_scores[0, 1:] = float("-inf")
    buffers, _ = check(plain, slots=[0])
    assert buffers.parents[0].tolist() == [-1, 0, -1, -1, -1, -1, -1]
    assert buffers.depths[0].tolist() == [0] + [1] * 6
    assert buffers.masks[0].tolist() == [1] + [1 | 1 << row for row in range(1, 7)]


def test_sign_bit():
    """Catches: row 63 without its own bit, which is the sign of int64."""
    buffers, _ = check(draw_candidates(TreeShape(16, 4, 63), 1, 0, (-1.0,)), [0])
    assert int(buffers.masks[0, 63]) < 0


def test_idle_row_writes_no_slot():
    """Catches: slot -1 written, that is the memory before the first slot."""
    shape = TreeShape(3, 4, 7)
    buffers, drafts = check(draw_candidates(shape, 3, 0, (-1.0, -2.0)), [-1, 2, -1])
    assert (buffers.parents[:2] == POISON).all()
    assert (drafts[:3, 1:-1] != POISON).all()
