"""Flash-decoding's bookkeeping: how the KV is split, and the merge of the parts.

Memory of the merge: every part is read once, ``(Dv + 1) * 4`` bytes per (row, head) and
split; the output is written once. At the usual sizes the parts come from L2.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from functools import lru_cache

import torch
from vllm.triton_utils import tl, triton

MIN_SPLIT = 128
"""Fewest prefix tokens worth a program of their own."""


@triton.jit
def split_length(prefix_len, num_splits, UNIT: tl.constexpr):
    """Prefix tokens per split, a multiple of UNIT; both kernels must agree on it."""
    return tl.maximum(tl.cdiv(tl.cdiv(prefix_len, num_splits), UNIT), 1) * UNIT


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    part_ptr,
    part_stride_split,
    part_stride_row,
    part_stride_head,
    lse_ptr,
    lse_stride_split,
    lse_stride_row,
    prefix_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    out_stride_row,
    out_stride_head,
    num_splits,
    DV: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SUFFIX_PART: tl.constexpr,
):
    """Grid ``(max_query_len, num_reqs, H)``; one program merges one row of one head.

    With SUFFIX_PART part ``num_splits`` is the suffix, else it is within the first
    split. Never reads: splits without prefix tokens, but for the first of these.
    """
    req = tl.program_id(1)
    head = tl.program_id(2)
    row_start = tl.load(query_start_loc_ptr + req)
    if tl.program_id(0) >= tl.load(query_start_loc_ptr + req + 1) - row_start:
        return
    row = (row_start + tl.program_id(0)).to(tl.int64)
    prefix_len = tl.load(prefix_lens_ptr + req)
    split_len = split_length(prefix_len, num_splits, SPLIT_UNIT)
    num_used = tl.cdiv(prefix_len, split_len)
    if not SUFFIX_PART:
        num_used = tl.maximum(num_used, 1)
    lse_row = lse_ptr + row * lse_stride_row + head
    part_row = part_ptr + row * part_stride_row + head * part_stride_head
    splits = tl.arange(0, BLOCK_SPLITS)
    lses = tl.load(
        lse_row + splits * lse_stride_split,
        mask=(splits < num_used) | (SUFFIX_PART & (splits == num_splits)),
        other=float("-inf"),
    )
    m = tl.max(lses, axis=0)
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2(lses - m), axis=0)
    d = tl.arange(0, DV)
    acc = tl.zeros([DV], tl.float32)
    if SUFFIX_PART:
        weight = tl.exp2(tl.load(lse_row + num_splits * lse_stride_split) - m)
        acc += tl.load(part_row + num_splits * part_stride_split + d) * weight
    for first in range(0, num_used, CHUNK):
        s = first + tl.arange(0, CHUNK)
        ok = s < num_used
        lse = tl.load(lse_row + s * lse_stride_split, mask=ok, other=float("-inf"))
        part = tl.load(
            part_row + s[:, None] * part_stride_split + d[None, :],
            mask=ok[:, None],
            other=0.0,
        )
        acc += tl.sum(part * tl.exp2(lse - m)[:, None], axis=0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + row * out_stride_row + head * out_stride_head
    tl.store(out_row + d, acc.to(out_ptr.dtype.element_ty))


def merge_splits(
    # [num_parts, num_rows, H, Dv] float32, normalised
    part: torch.Tensor,
    # [num_parts, num_rows, H] float32 base-2 log-sum-exp
    lse: torch.Tensor,
    # [num_reqs] int32
    prefix_lens: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    max_query_len: int,
    # what the split length is a multiple of
    unit: int,
    # [num_rows, H, Dv], overwritten
    out: torch.Tensor,
    # whether the last part is the suffix
    suffix_part: bool,
) -> None:
    """Merge the parts of each row by their log-sum-exp into ``out``."""
    num_parts, _, num_heads, dv = part.shape
    num_reqs = query_start_loc.shape[0] - 1
    block = triton.next_power_of_2(num_parts)
    _merge_splits_kernel[(max_query_len, num_reqs, num_heads)](
        part,
        *part.stride()[:3],
        lse,
        *lse.stride()[:2],
        prefix_lens,
        query_start_loc,
        out,
        *out.stride()[:2],
        num_parts - suffix_part,
        DV=dv,
        SPLIT_UNIT=unit,
        BLOCK_SPLITS=block,
        CHUNK=min(block, 8),
        SUFFIX_PART=suffix_part,
        num_warps=2,
    )


@lru_cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_num_splits(num_programs: int, max_prefix_len: int, slots: int) -> int:
    """Splits that leave the fewest waves of work, ``slots`` programs at a time.

    Prefers few splits: each costs a partial result. Bounded by MIN_SPLIT tokens each.
    """
    most = max(1, min(-(-max_prefix_len // MIN_SPLIT), slots // max(num_programs, 1)))
    few = range(1, max(most, 4) + 1) if max_prefix_len > 4 * MIN_SPLIT else (most,)
    return min(few, key=lambda s: (-(-num_programs * s // slots) + 0.04 * s) / s)
