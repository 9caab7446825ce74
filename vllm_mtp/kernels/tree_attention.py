"""Attention of tree rows to their own tree, merged with the attention to the prefix.

Maths: with prefix output ``o`` and log-sum-exp ``z`` the online softmax simply starts
at maximum ``z``, sum 1 and accumulator ``o``; every allowed suffix row is then one more
key. Nothing is materialised in between.

Memory: per row and head the query and the prefix output are read once and the output
is written once, about 3.2 KB for MLA in bf16; the suffix, at most 64 rows, comes from
L2. The kernel is bound by latency at small batches and by bandwidth at large ones.
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
    merge_scores,
    zero_not_finite,
)

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@triton.jit(do_not_specialize=["max_suffix", "num_suffix_slots", "num_slots"])
def _attend_suffix_kernel(
    q_ptr,
    q_stride_row,
    q_stride_head,
    q_pe_ptr,
    q_pe_stride_row,
    q_pe_stride_head,
    k_ptr,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_ptr,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    query_start_loc_ptr,
    row_masks_ptr,
    suffix_start_ptr,
    suffix_slots_ptr,
    prefix_lens_ptr,
    prefix_out_ptr,
    prefix_out_stride_row,
    prefix_out_stride_head,
    prefix_lse_ptr,
    prefix_lse_stride_req,
    prefix_lse_stride_row,
    prefix_lse_stride_head,
    out_ptr,
    out_stride_row,
    out_stride_head,
    q_scale_ptr,
    k_scale_ptr,
    scale,
    max_suffix,
    num_suffix_slots,
    num_slots,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PE: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    V_IS_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    LSE_BY_REQ: tl.constexpr,
    HAS_PREFIX_LENS: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid ``(row tiles, num_reqs, KV heads)``; one tile is BLOCK_M (row, head) pairs
    of one request and one KV head.

    Never reads: slots that no row of the tile attends to, prefix outputs of other
    rows. Prefix outputs of an empty prefix are read and dropped.
    """
    req = tl.program_id(1)
    kv_head = tl.program_id(2)
    row_start = tl.load(query_start_loc_ptr + req)
    num_rows = tl.load(query_start_loc_ptr + req + 1) - row_start
    pair = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= num_rows * GROUP:
        return
    local_rows = pair // GROUP
    row_ok = local_rows < num_rows
    rows = (row_start + local_rows).to(tl.int64)
    heads = (kv_head * GROUP + pair % GROUP).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_ok = d < D
    dv = tl.arange(0, BLOCK_DV)
    dv_ok = dv < DV

    q_rows = q_ptr + rows * q_stride_row + heads * q_stride_head
    q = tl.load(
        q_rows[:, None] + d[None, :], mask=row_ok[:, None] & d_ok[None, :], other=0.0
    ).to(DTYPE)
    out_mask = row_ok[:, None] & dv_ok[None, :]
    prefix_rows = (
        prefix_out_ptr + rows * prefix_out_stride_row + heads * prefix_out_stride_head
    )
    acc = tl.load(prefix_rows[:, None] + dv[None, :], mask=out_mask, other=0.0)
    acc = acc.to(tl.float32)
    lse_rows = local_rows.to(tl.int64) if LSE_BY_REQ else rows
    lse_rows = (
        prefix_lse_ptr + req * prefix_lse_stride_req + lse_rows * prefix_lse_stride_row
    )
    lse = tl.load(
        lse_rows + heads * prefix_lse_stride_head, mask=row_ok, other=float("-inf")
    )
    # An empty prefix: backends leave anything in lse and out.
    has_prefix = (lse > float("-inf")) & (lse < float("inf"))
    if HAS_PREFIX_LENS:
        has_prefix = has_prefix & (tl.load(prefix_lens_ptr + req) > 0)
    m = tl.where(has_prefix, lse * LOG2_E, float("-inf"))
    l = tl.where(has_prefix, 1.0, 0.0)  # noqa: E741
    acc = tl.where(has_prefix[:, None], acc, 0.0)

    scale = scale * LOG2_E
    v_scale = 1.0
    if HAS_Q_SCALE:
        scale = scale * tl.load(q_scale_ptr)
    if HAS_K_SCALE:
        v_scale = tl.load(k_scale_ptr)
        scale = scale * v_scale

    for chunk in range(NUM_CHUNKS):
        allowed, used, slots = load_suffix(
            row_masks_ptr,
            suffix_start_ptr,
            suffix_slots_ptr,
            req,
            rows,
            local_rows,
            row_ok,
            chunk * BLOCK_S,
            max_suffix,
            num_suffix_slots,
            num_slots,
            CAUSAL,
            BLOCK_S,
        )
        block = slots // PAGE
        offset = slots % PAGE
        k_rows = k_ptr + block * k_stride_block + offset * k_stride_slot
        k_rows += kv_head * k_stride_head
        k = tl.load(
            k_rows[:, None] + d[None, :], mask=used[:, None] & d_ok[None, :], other=0.0
        ).to(DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if D_PE > 0:
            pe = tl.arange(0, BLOCK_PE)
            pe_ok = pe < D_PE
            q_pe_rows = q_pe_ptr + rows * q_pe_stride_row + heads * q_pe_stride_head
            q_pe = tl.load(
                q_pe_rows[:, None] + pe[None, :],
                mask=row_ok[:, None] & pe_ok[None, :],
                other=0.0,
            ).to(DTYPE)
            k_pe = tl.load(
                k_rows[:, None] + D + pe[None, :],
                mask=used[:, None] & pe_ok[None, :],
                other=0.0,
            ).to(DTYPE)
            scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee")
        scores = tl.where(allowed, scores * scale, float("-inf"))
        p, alpha, m, l = merge_scores(scores, m, l)  # noqa: E741
        if V_IS_K:
            v = k
        else:
            v_rows = v_ptr + block * v_stride_block + offset * v_stride_slot
            v_rows += kv_head * v_stride_head
            v = tl.load(
                v_rows[:, None] + dv[None, :],
                mask=used[:, None] & dv_ok[None, :],
                other=0.0,
            ).to(DTYPE)
        v = zero_not_finite(v)
        acc = acc * alpha[:, None]
        if HAS_K_SCALE:
            p = p * v_scale
        acc = tl.dot(p.to(DTYPE), v, acc, input_precision="ieee")

    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_rows = out_ptr + rows * out_stride_row + heads * out_stride_head
    tl.store(
        out_rows[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask
    )


def tree_suffix_attention(
    # [num_rows, H, Dk], or its parts ([num_rows, H, Dv], [num_rows, H, Dk - Dv])
    query: Query,
    # [num_slots, H_kv, Dk]; paged MLA: [num_blocks, block_size, Dk]; paged GQA:
    # [num_blocks, block_size, H_kv, Dk]
    key: torch.Tensor,
    # like key, with Dv; MLA: key[..., :Dv]
    value: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_rows] int64 ancestor bits; None: causal
    row_masks: torch.Tensor | None,
    # [num_reqs] int32
    suffix_start: torch.Tensor,
    # [*] int64
    suffix_slots: torch.Tensor,
    max_suffix: int,
    # [num_rows, H, Dv]
    prefix_out: torch.Tensor,
    # [num_rows, H] float32 natural log, any strides, or [num_reqs, H, max_query_len]
    prefix_lse: torch.Tensor,
    scale: float,
    *,
    # longest query in rows; None: all rows (one more tile per row that isn't there)
    max_query_len: int | None = None,
    # [num_reqs] int32; where 0, prefix_out and prefix_lse may hold anything
    prefix_lens: torch.Tensor | None = None,
    # [1] float32 scales of an FP8 query and FP8 cache
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    # [num_rows, H, Dv]; None: a new tensor; prefix_out itself is allowed
    out: torch.Tensor | None = None,
    # launch parameters, for tuning
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Attend to the suffix rows allowed by ``row_masks`` and merge with the prefix.

    The fast twin of ``vllm_mtp.reference.tree_attention.tree_suffix_attention``, which
    is the contract; besides, it takes split queries, paged caches of any block stride,
    FP8 with scales, and ``lse = +inf`` as another sign of an empty prefix. A 3-D
    ``key`` is a paged MLA cache if its last dimension is wider than ``value``'s.

    Raises:
        ValueError: for shapes or strides that the kernel cannot read.
    """
    key, value = _as_paged(key, value)
    num_heads, num_kv_heads = prefix_out.shape[1], key.shape[2]
    dv = value.shape[3]
    q, q_pe = query if isinstance(query, tuple) else _split_query(query, key, value)
    _check_inputs(q, q_pe, key, value, prefix_out, max_suffix)
    v_is_k = value.data_ptr() == key.data_ptr() and dv == q.shape[2]
    if out is None:
        out = torch.zeros_like(prefix_out)
    num_reqs = query_start_loc.shape[0] - 1
    rows = q.shape[0] if max_query_len is None else max_query_len
    group = num_heads // num_kv_heads
    if num_reqs == 0 or rows == 0:
        return out
    block_s = min(max(triton.next_power_of_2(max_suffix), 16), 32)
    launch = {**_choose_config(rows * group * num_reqs, block_s), **(config or {})}
    lse_by_req = prefix_lse.dim() == 3
    lse_strides = (
        (prefix_lse.stride(0), prefix_lse.stride(2), prefix_lse.stride(1))
        if lse_by_req
        else (0, prefix_lse.stride(0), prefix_lse.stride(1))
    )
    d, d_pe = q.shape[2], q_pe.shape[2]
    grid = (triton.cdiv(rows * group, launch["BLOCK_M"]), num_reqs, num_kv_heads)
    _attend_suffix_kernel[grid](
        q,
        q.stride(0),
        q.stride(1),
        q_pe,
        q_pe.stride(0),
        q_pe.stride(1),
        key,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        value,
        value.stride(0),
        value.stride(1),
        value.stride(2),
        query_start_loc,
        row_masks,
        suffix_start,
        suffix_slots,
        prefix_lens,
        prefix_out,
        prefix_out.stride(0),
        prefix_out.stride(1),
        prefix_lse,
        *lse_strides,
        out,
        out.stride(0),
        out.stride(1),
        q_scale,
        k_scale,
        scale,
        max_suffix,
        suffix_slots.shape[0],
        key.shape[0] * key.shape[1],
        GROUP=group,
        PAGE=key.shape[1],
        D=d,
        D_PE=d_pe,
        DV=dv,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK_PE=triton.next_power_of_2(max(d_pe, 16)),
        BLOCK_DV=triton.next_power_of_2(dv),
        BLOCK_S=block_s,
        NUM_CHUNKS=triton.cdiv(max_suffix, block_s),
        V_IS_K=v_is_k,
        CAUSAL=row_masks is None,
        LSE_BY_REQ=lse_by_req,
        HAS_PREFIX_LENS=prefix_lens is not None,
        HAS_Q_SCALE=q_scale is not None,
        HAS_K_SCALE=k_scale is not None,
        DTYPE=dot_dtype(out),
        **launch,
    )
    return out


def _choose_config(num_pairs: int, block_s: int) -> dict[str, Any]:
    """Launch parameters for ``num_pairs`` (row, head) pairs; chosen on an H200."""
    # Two warps leave room for four programs per SM, where there are that many.
    warps = 2 if num_pairs >= 4096 and block_s == 16 else 4
    return {"BLOCK_M": 16, "num_warps": warps, "num_stages": 1}


def _as_paged(
    key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[num_blocks, block_size, H_kv, D]`` of the three accepted layouts."""
    if key.dim() == 4:
        return key, value
    if key.dim() != 3:
        raise ValueError(
            f"tree attention: key has {key.dim()} dimensions; use [num_slots, H_kv, "
            "Dk], [num_blocks, block_size, Dk] or [num_blocks, block_size, H_kv, Dk]."
        )
    if key.shape[2] > value.shape[2]:
        return key.unsqueeze(2), value.unsqueeze(2)
    return key.unsqueeze(1), value.unsqueeze(1)


def _split_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA: the part that meets the value, and the rest; GQA: all, and nothing."""
    width = value.shape[3] if key.data_ptr() == value.data_ptr() else key.shape[3]
    return query[..., :width], query[..., width:]


def _check_inputs(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_out: torch.Tensor,
    max_suffix: int,
) -> None:
    check_max_suffix(max_suffix)
    if q.shape[2] + q_pe.shape[2] != key.shape[3]:
        raise ValueError(
            f"tree attention: the query is {q.shape[2]} + {q_pe.shape[2]} wide and the "
            f"key {key.shape[3]}; they must agree."
        )
    if prefix_out.shape != (*q.shape[:2], value.shape[3]):
        raise ValueError(
            f"tree attention: prefix_out is {list(prefix_out.shape)}; expected "
            f"{[*q.shape[:2], value.shape[3]]}."
        )
    if q.shape[1] % key.shape[2]:
        raise ValueError(
            f"tree attention: {q.shape[1]} query heads are no multiple of "
            f"{key.shape[2]} KV heads."
        )
    check_unit_stride(query=q, key=key, value=value, prefix_out=prefix_out)
