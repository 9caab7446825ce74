"""Tiles of latent keys for MLA attention: how they are loaded and attended to.

The latent has two parts, the program's own slice of the value and the rest; with the
RoPE part a key is the tuple ``(own, rest, rope)``. With one value slice the slice is
the whole latent and ``rest`` is not used.
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
def load_keys(keys_ptr, ok, columns, V_SLICES: tl.constexpr):
    """The parts of the keys at ``keys_ptr [N]``; zeros where not ``ok``."""
    mask = ok[:, None]
    own = tl.load(keys_ptr[:, None] + columns[0][None, :], mask=mask, other=0.0)
    rest = own
    if V_SLICES == 2:
        rest = tl.load(keys_ptr[:, None] + columns[1][None, :], mask=mask, other=0.0)
    rope = tl.load(keys_ptr[:, None] + columns[2][None, :], mask=mask, other=0.0)
    return own, rest, rope


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
    V_SLICES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Fold one tile of keys into the running softmax: ``(m, l, acc)``."""
    scores = tl.dot(query[0], tl.trans(keys[0]), input_precision="ieee")
    if V_SLICES == 2:
        rest = tl.trans(keys[1].to(DTYPE))
        scores = tl.dot(query[1], rest, scores, input_precision="ieee")
    rope = tl.trans(keys[2].to(DTYPE))
    scores = tl.dot(query[2], rope, scores, input_precision="ieee")
    scores = tl.where(allowed, scores * scale, float("-inf"))
    p, alpha, m, l = merge_scores(scores, m, l)  # noqa: E741
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(DTYPE), value, acc, input_precision="ieee")
    return m, l, acc
