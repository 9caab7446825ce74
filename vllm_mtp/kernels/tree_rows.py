"""Positions and attention masks of the rows of a verify pass.

One launch, one program per request, at most 64 rows each: a few hundred bytes.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.kernels.checks import INDEX_DTYPES, check_tensor
from vllm_mtp.tree.layout import MAX_ROWS


@triton.jit
def _prepare_rows_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    prefill_len_ptr,
    # [num_tokens] int64
    positions_ptr,
    # [max_num_reqs, NUM_ROWS]
    depths_ptr,
    masks_ptr,
    # [max_num_tokens] int64
    row_masks_ptr,
    NUM_ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Grid (num_reqs,): the first 64 rows of one request; later rows are not read."""
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    end = tl.load(query_start_loc_ptr + req + 1).to(tl.int64)
    num_logits = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    if end <= start:
        return
    busy = slot >= 0
    prefill_len = tl.load(prefill_len_ptr + slot, mask=busy, other=0)
    base = tl.load(positions_ptr + start)
    is_tree = busy & (num_logits > 1) & (base >= prefill_len)

    rows = tl.arange(0, ROW_BLOCK)
    in_req = rows < end - start
    # Loaded whether tree or not, so as not to wait for the answer.
    in_slot = in_req & (rows < tl.where(busy, NUM_ROWS, 0))
    depths = tl.load(depths_ptr + slot * NUM_ROWS + rows, mask=in_slot, other=0)
    tree_masks = tl.load(masks_ptr + slot * NUM_ROWS + rows, mask=in_slot, other=0)
    in_tree = in_req & (rows < tl.where(is_tree, NUM_ROWS, 0))
    # Row 63 needs all 64 bits: 2 << 63 is 0, minus 1 is -1.
    causal = (tl.full([ROW_BLOCK], 2, tl.int64) << rows.to(tl.int64)) - 1
    # Row 0 has depth 0, so the word `base` came from is rewritten with itself.
    tl.store(positions_ptr + start + rows, base + depths, mask=in_tree)
    tl.store(
        row_masks_ptr + start + rows,
        tl.where(in_tree, tree_masks, causal),
        mask=in_req,
    )


def prepare_tree_rows(
    buffers: TreeBuffers,
    # [num_reqs] int32/int64 batch row -> request slot; < 0: idle row, causal bits
    idx_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs + 1] int32; a request has (logits rows - 1) drafts
    cu_num_logits: torch.Tensor,
    # [max_num_reqs] int32 by slot
    prefill_len: torch.Tensor,
    # [num_tokens] int64, linear positions in, tree positions out
    positions: torch.Tensor,
) -> None:
    """Turn linear positions of tree rows into root position + depth; set row masks.

    The contract is that of ``vllm_mtp.reference.tree_rows``. Mutates ``positions`` and
    ``buffers.row_masks``.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    num_reqs = idx_mapping.shape[0]
    like = buffers.masks
    check_tensor("idx_mapping", idx_mapping, INDEX_DTYPES, (0,), like)
    check_tensor(
        "query_start_loc", query_start_loc, INDEX_DTYPES, (num_reqs + 1,), like
    )
    check_tensor("cu_num_logits", cu_num_logits, INDEX_DTYPES, (num_reqs + 1,), like)
    check_tensor("prefill_len", prefill_len, INDEX_DTYPES, (1,), like)
    check_tensor("positions", positions, (torch.int64,), (0,), like)
    if num_reqs == 0:
        return
    _prepare_rows_kernel[(num_reqs,)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        prefill_len,
        positions,
        buffers.depths,
        buffers.masks,
        buffers.row_masks,
        NUM_ROWS=buffers.shape.num_rows,
        ROW_BLOCK=MAX_ROWS,
        num_warps=1,
    )
