"""What the tree attention kernels share: softmax state, suffix addressing, types."""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any

import torch
from vllm.triton_utils import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E); the hardware has exp2."""

MAX_SUFFIX = 64
"""Ancestor sets are the bits of one int64."""


@triton.jit
def merge_scores(scores, m, l):  # noqa: E741
    """Fold scaled base-2 ``scores [M, S]`` into the running softmax ``(m, l)``.

    Returns ``(p, alpha, m, l)``: the new weights, what the accumulator is multiplied
    with, and the new state. Rows that have seen no key keep ``m = -inf, l = 0``.
    """
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m - shift)
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def load_suffix(
    row_masks_ptr,
    suffix_start_ptr,
    suffix_slots_ptr,
    req,
    rows,
    local_rows,
    row_ok,
    first,
    max_suffix,
    num_suffix_slots,
    num_slots,
    CAUSAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Who may see suffix rows ``first..first + BLOCK_S``, and where they lie.

    Returns ``(allowed [M, S], used [S], slots [S])``. A slot outside the cache counts
    as not allowed.
    """
    j = first + tl.arange(0, BLOCK_S)
    entry = tl.load(suffix_start_ptr + req).to(tl.int64) + j
    known = (j < max_suffix) & (entry < num_suffix_slots)
    slots = tl.load(suffix_slots_ptr + entry, mask=known, other=-1).to(tl.int64)
    if CAUSAL:
        allowed = j[None, :] <= local_rows[:, None]
    else:
        bits = tl.load(row_masks_ptr + rows, mask=row_ok, other=0)
        allowed = ((bits[:, None] >> j[None, :].to(tl.int64)) & 1) != 0
    inside = (slots >= 0) & (slots < num_slots) & known
    allowed = allowed & inside[None, :] & row_ok[:, None]
    used = tl.max(allowed.to(tl.int32), axis=0) > 0
    return allowed, used, slots


@triton.jit
def zero_not_finite(x):
    """Zero the NaN and infinity of values: a weight of 0 must make them vanish."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


def dot_dtype(like: torch.Tensor) -> Any:
    """The Triton type of matrix operands for results like ``like``.

    float32 on the CPU, where the interpreter's dot does not know bfloat16.
    """
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return types.get(like.dtype, tl.float32) if like.is_cuda else tl.float32


def check_max_suffix(max_suffix: int) -> None:
    """Raise ``ValueError`` unless the suffix fits the bits of a row."""
    if not 1 <= max_suffix <= MAX_SUFFIX:
        raise ValueError(
            f"tree attention: max_suffix={max_suffix} is out of range; use 1 to "
            f"{MAX_SUFFIX} (bits of an int64)."
        )


def check_unit_stride(**tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` for a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"tree attention: the last dimension of {name} has stride "
                f"{tensor.stride(-1)}; it must be 1. Call .contiguous() on it."
            )
