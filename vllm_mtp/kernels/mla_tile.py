"""Tiles of latent keys for MLA attention: how they are loaded and attended to.

A key is the pair ``(latent, rope)``; its latent part is also the value.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from vllm.triton_utils import tl, triton

from vllm_mtp.kernels.attention_common import merge_scores


@triton.jit
def load_blocks(block_table, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Physical blocks of tokens ``start..``: one, or one per token of a wide tile."""
    if PAGE % BLOCK_N == 0:
        blocks = tl.load(block_table + start // PAGE, mask=start < end, other=0)
    else:
        n = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(block_table + n // PAGE, mask=n < end, other=0)
    return blocks.to(tl.int64)


@triton.jit
def locate_tokens(
    kv_ptr, strides, blocks, start, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers to the keys of tokens ``start..start + BLOCK_N``."""
    n = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        base = kv_ptr + blocks * strides[0] + (start % PAGE) * strides[1]
        return base + n * strides[1]
    return kv_ptr + blocks * strides[0] + ((start + n) % PAGE) * strides[1]


@triton.jit
def load_keys(keys_ptr, ok, DV: tl.constexpr, D_PE: tl.constexpr):
    """``(latent, rope)`` of the keys at ``keys_ptr [N]``; zeros where not ``ok``."""
    d = tl.arange(0, DV)
    pe = DV + tl.arange(0, D_PE)
    latent = tl.load(keys_ptr[:, None] + d[None, :], mask=ok[:, None], other=0.0)
    rope = tl.load(keys_ptr[:, None] + pe[None, :], mask=ok[:, None], other=0.0)
    return latent, rope


@triton.jit
def attend_tile(
    query,
    keys,
    value,
    allowed,
    scale,
    m,
    l,  # noqa: E741
    acc,
):
    """Fold one tile of keys into the running softmax: ``(m, l, acc)``."""
    scores = tl.dot(query[0], tl.trans(keys[0]), input_precision="ieee")
    scores = tl.dot(query[1], tl.trans(keys[1]), scores, input_precision="ieee")
    scores = tl.where(allowed, scores * scale, float("-inf"))
    p, alpha, m, l = merge_scores(scores, m, l)  # noqa: E741
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    return m, l, acc
