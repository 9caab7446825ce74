"""Tree attention without FlashAttention 3 or FlashMLA: one pass over the paged KV.

All rows of a request times all heads form one matrix dimension, so the KV is read once
per tile of 64 or 128 (row, head) pairs instead of once per row. The KV is split among
programs (flash-decoding); a second kernel merges the splits by log-sum-exp. The first
split attends to the suffix as well; where prefixes are long the suffix is a part of its
own, last in the grid, so that it runs where the splits leave SMs idle.

Work per tile and key: ``2 * BLOCK_M * (Dk + Dv)`` operations. A float32 accumulator of
64 rows by 512 fills half of an SM's registers and shared memory holds the query and two
tiles of 64 keys, so an SM runs one program of 8 warps. The partial results,
``(Dv + 1) * 4`` bytes per (row, head) and split, stay in L2 at the usual sizes.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.kernels.attention_common import (
    LOG2_E,
    check_max_suffix,
    check_unit_stride,
    dot_dtype,
    load_suffix,
    zero_not_finite,
)
from vllm_mtp.kernels.mla_tile import (
    attend_tile,
    load_blocks,
    load_keys,
    locate_tokens,
)
from vllm_mtp.kernels.split_kv import (
    choose_num_splits,
    merge_splits,
    num_sms,
    split_length,
)


@triton.jit(
    do_not_specialize=["num_splits", "max_suffix", "num_suffix_slots", "num_slots"]
)
def _attend_split_kernel(
    q_ptr,
    q_stride_row,
    q_stride_head,
    q_pe_ptr,
    q_pe_stride_row,
    q_pe_stride_head,
    kv_ptr,
    kv_stride_block,
    kv_stride_slot,
    block_table_ptr,
    block_table_stride,
    suffix_ptr,
    suffix_stride_block,
    suffix_stride_slot,
    prefix_lens_ptr,
    query_start_loc_ptr,
    row_masks_ptr,
    suffix_start_ptr,
    suffix_slots_ptr,
    out_ptr,
    out_stride_split,
    out_stride_row,
    out_stride_head,
    lse_ptr,
    lse_stride_split,
    lse_stride_row,
    q_scale_ptr,
    k_scale_ptr,
    scale,
    max_suffix,
    num_suffix_slots,
    num_slots,
    num_splits,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    SUFFIX_PAGE: tl.constexpr,
    DV: tl.constexpr,
    D_PE: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SUFFIX_PART: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid ``(row tiles, parts, num_reqs)``; one program attends one tile of (row,
    head) pairs to one split of the prefix, or to the suffix, and writes the result,
    normalised, and its base-2 log-sum-exp. The first split attends to the suffix too,
    or with SUFFIX_PART, grid ``(row tiles, num_reqs, parts)``, the part behind the last
    split does.

    Never reads: tokens and block table entries past the prefix, suffix slots that no
    row of the tile attends to.
    """
    first_pair = tl.program_id(0) * BLOCK_M
    if SUFFIX_PART:
        req = tl.program_id(1)
        split = tl.program_id(2)
        has_suffix = split == num_splits
    else:
        req = tl.program_id(2)
        split = tl.program_id(1)
        has_suffix = split == 0
    row_start = tl.load(query_start_loc_ptr + req)
    num_rows = tl.load(query_start_loc_ptr + req + 1) - row_start
    prefix_len = tl.load(prefix_lens_ptr + req)
    split_len = split_length(prefix_len, num_splits, SPLIT_UNIT)
    begin = split * split_len
    end = tl.minimum(begin + split_len, prefix_len)
    if (first_pair >= num_rows * H) | ((begin >= prefix_len) & (not has_suffix)):
        return
    pair = first_pair + tl.arange(0, BLOCK_M)
    local_rows = pair // H
    row_ok = local_rows < num_rows
    rows = (row_start + local_rows).to(tl.int64)
    heads = pair % H

    d = tl.arange(0, DV)
    pe = tl.arange(0, D_PE)
    q_ok = row_ok[:, None]
    q_rows = q_ptr + rows * q_stride_row + heads * q_stride_head
    q_latent = tl.load(q_rows[:, None] + d[None, :], mask=q_ok, other=0.0)
    q_rows = q_pe_ptr + rows * q_pe_stride_row + heads * q_pe_stride_head
    q_rope = tl.load(q_rows[:, None] + pe[None, :], mask=q_ok, other=0.0)
    query = (q_latent.to(DTYPE), q_rope.to(DTYPE))

    scale = scale * LOG2_E
    v_scale = 1.0
    if HAS_Q_SCALE:
        scale = scale * tl.load(q_scale_ptr)
    if HAS_K_SCALE:
        v_scale = tl.load(k_scale_ptr)
        scale = scale * v_scale
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, DV], tl.float32)

    table = block_table_ptr + req.to(tl.int64) * block_table_stride
    strides = (kv_stride_block, kv_stride_slot)
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        blocks = load_blocks(table, start, end, PAGE, BLOCK_N)
        keys_ptr = locate_tokens(kv_ptr, strides, blocks, start, PAGE, BLOCK_N)
        latent, rope = load_keys(keys_ptr, start + n < end, DV, D_PE)
        keys = (latent.to(DTYPE), rope.to(DTYPE))
        allowed = (start + n < end)[None, :]
        m, l, acc = attend_tile(  # noqa: E741
            query, keys, keys[0], allowed, scale, m, l, acc
        )

    if has_suffix:
        for first in tl.range(0, max_suffix, BLOCK_S, num_stages=1):
            allowed, used, slots = load_suffix(
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
                CAUSAL,
                BLOCK_S,
            )
            keys_ptr = suffix_ptr + (slots // SUFFIX_PAGE) * suffix_stride_block
            keys_ptr += (slots % SUFFIX_PAGE) * suffix_stride_slot
            latent, rope = load_keys(keys_ptr, used, DV, D_PE)
            keys = (latent.to(DTYPE), rope.to(DTYPE))
            value = zero_not_finite(keys[0])
            m, l, acc = attend_tile(  # noqa: E741
                query, keys, value, allowed, scale, m, l, acc
            )

    acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    out_rows = out_ptr + split * out_stride_split + rows * out_stride_row
    out_rows += heads * out_stride_head
    tl.store(
        out_rows[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_ok
    )
    if WRITE_LSE:
        lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(tl.maximum(l, 1e-38)))
        lse_rows = lse_ptr + split * lse_stride_split + rows * lse_stride_row + heads
        tl.store(lse_rows, lse, mask=row_ok)


SUFFIX_PART_FROM = 8192
"""Prefix tokens from which the suffix is a part of its own: measured faster on an H200
at 12k (1 and 16 requests of 8 rows), slower at 1k and for single rows."""

NARROW = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
WIDE = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
"""Tile shapes, chosen on an H200."""


def choose_config(num_pairs: int) -> dict[str, Any]:
    """Tile shape for ``num_pairs`` (row, head) pairs per request."""
    return NARROW if num_pairs <= NARROW["BLOCK_M"] else WIDE


def paged_tree_attention(
    # ([num_rows, H, Dv], [num_rows, H, Dk - Dv]) latent and RoPE part of the query
    query: tuple[torch.Tensor, torch.Tensor],
    # [num_blocks, block_size, Dk] paged latent cache, any block stride
    kv_cache: torch.Tensor,
    # [num_reqs, max_blocks] int32; entries past the prefix are never read
    block_table: torch.Tensor,
    # [num_reqs] int32 tokens before the root
    prefix_lens: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_rows] int64 ancestor bits; None: causal
    row_masks: torch.Tensor | None,
    # [num_reqs] int32
    suffix_start: torch.Tensor,
    # [*] int64 slots in suffix_cache
    suffix_slots: torch.Tensor,
    max_suffix: int,
    scale: float,
    *,
    # longest query in rows
    max_query_len: int,
    # upper bound of prefix_lens
    max_prefix_len: int,
    # [*, block_size, Dk]; None: the suffix lies in kv_cache
    suffix_cache: torch.Tensor | None = None,
    # [1] float32 scales of an FP8 query and FP8 cache
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    # None: the dtype of the query
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    # whether the suffix has programs of its own
    suffix_part: bool | None = None,
    # launch parameters, for tuning
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Attend every row to its request's prefix and to the suffix rows of its mask.

    Equals ``tree_suffix_attention`` over ``paged_prefix_attention`` of the reference,
    for one KV head whose value is the first Dv numbers of the key (MLA). Returns
    ``[num_rows, H, Dv]``; rows past ``query_start_loc[-1]`` hold anything.

    Raises:
        ValueError: for shapes or strides that the kernel cannot read.
    """
    q, q_pe = query
    suffix = kv_cache if suffix_cache is None else suffix_cache
    _check_inputs(q, q_pe, kv_cache, suffix, max_suffix)
    num_rows, num_heads, dv = q.shape
    num_reqs = query_start_loc.shape[0] - 1
    out = q.new_empty(q.shape, dtype=out_dtype or q.dtype)
    if num_reqs == 0 or num_rows == 0:
        return out
    launch = {**choose_config(max_query_len * num_heads), **(config or {})}
    stages = launch.pop("num_stages")
    tiles = triton.cdiv(max_query_len * num_heads, launch["BLOCK_M"])
    if suffix_part is None:
        suffix_part = max_prefix_len >= SUFFIX_PART_FROM and max_query_len > 1
    if num_splits is None:
        # Two of the smallest tiles fit an SM.
        per_sm = 2 if launch["BLOCK_M"] <= 16 else 1
        programs, slots = tiles * num_reqs, num_sms(q.device) * per_sm
        if suffix_part and programs * 8 <= slots:
            # Few enough that the suffix parts can run beside the splits.
            slots -= programs
        num_splits = choose_num_splits(programs, max_prefix_len, slots)
    unit = max(launch["BLOCK_N"], kv_cache.shape[1])
    suffix_part = suffix_part and num_splits > 1
    num_parts = num_splits + suffix_part
    if num_parts == 1:
        part, lse = out.unsqueeze(0), prefix_lens.view(1, 1, -1)
    else:
        part = q.new_empty(num_parts, *q.shape, dtype=torch.float32)
        lse = q.new_empty(num_parts, num_rows, num_heads, dtype=torch.float32)
    grid = (tiles, num_reqs, num_parts) if suffix_part else (tiles, num_parts, num_reqs)
    _attend_split_kernel[grid](
        q,
        q.stride(0),
        q.stride(1),
        q_pe,
        q_pe.stride(0),
        q_pe.stride(1),
        kv_cache,
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table,
        block_table.stride(0),
        suffix,
        suffix.stride(0),
        suffix.stride(1),
        prefix_lens,
        query_start_loc,
        row_masks,
        suffix_start,
        suffix_slots,
        part,
        *part.stride()[:3],
        lse,
        *lse.stride()[:2],
        q_scale,
        k_scale,
        scale,
        max_suffix,
        suffix_slots.shape[0],
        suffix.shape[0] * suffix.shape[1],
        num_splits,
        H=num_heads,
        PAGE=kv_cache.shape[1],
        SUFFIX_PAGE=suffix.shape[1],
        DV=dv,
        D_PE=q_pe.shape[2],
        SPLIT_UNIT=unit,
        BLOCK_S=16 if max_suffix <= 16 else 32,
        CAUSAL=row_masks is None,
        HAS_Q_SCALE=q_scale is not None,
        HAS_K_SCALE=k_scale is not None,
        WRITE_LSE=num_splits > 1,
        SUFFIX_PART=suffix_part,
        DTYPE=dot_dtype(out),
        STAGES=stages,
        **launch,
    )
    if num_splits > 1:
        merge_splits(
            part,
            lse,
            prefix_lens,
            query_start_loc,
            max_query_len,
            unit,
            out,
            suffix_part=suffix_part,
        )
    return out


def _check_inputs(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    suffix: torch.Tensor,
    max_suffix: int,
) -> None:
    check_max_suffix(max_suffix)
    width = q.shape[2] + q_pe.shape[2]
    for name, cache in (("kv_cache", kv_cache), ("suffix_cache", suffix)):
        if cache.dim() != 3 or cache.shape[2] != width:
            raise ValueError(
                f"tree attention: {name} is {list(cache.shape)}; expected "
                f"[num_blocks, block_size, {width}] as the query is {q.shape[2]} + "
                f"{q_pe.shape[2]} wide."
            )
    for name, size in (("latent", q.shape[2]), ("RoPE", q_pe.shape[2])):
        if size < 16 or size & (size - 1):
            raise ValueError(
                f"tree attention: the {name} part of the query is {size} wide; the "
                "Triton kernel takes powers of two from 16 on."
            )
    check_unit_stride(query=q, query_rope=q_pe, kv_cache=kv_cache, suffix_cache=suffix)
