"""Walk each tree along the tokens the target drew.

One launch, one program per request; every tensor of a tree fits in registers.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.kernels.checks import INDEX_DTYPES, check_tensor


@triton.jit
def _walk_tree_kernel(
    sampled_ptr,
    drafted_ptr,
    idx_mapping_ptr,
    cu_num_logits_ptr,
    # [max_num_reqs, NUM_ROWS] by slot
    parents_ptr,
    # [max_num_reqs, NUM_ROWS] by batch row
    path_ptr,
    # [num_reqs, NUM_ROWS]
    emitted_ptr,
    emitted_stride,
    num_emitted_ptr,
    NUM_ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Grid (num_reqs,): accepted path and emitted tokens of one request."""
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64)
    rows = tl.arange(0, ROW_BLOCK)
    in_req = (rows < end - start) & (rows < NUM_ROWS)
    is_node = in_req & (rows > 0) & (rows < tl.where(slot >= 0, NUM_ROWS, 0))
    parents = tl.load(parents_ptr + slot * NUM_ROWS + rows, mask=is_node, other=-1)
    drafted = tl.load(drafted_ptr + start + rows, mask=is_node, other=-1).to(tl.int64)
    sampled = tl.load(sampled_ptr + start + rows, mask=in_req, other=0).to(tl.int64)
    parents = tl.where(drafted >= 0, parents, -1)

    path = rows
    emitted = tl.zeros([ROW_BLOCK], tl.int64)
    count = tl.zeros([], tl.int32)
    row = tl.where(end > start, 0, ROW_BLOCK).to(tl.int32)
    while row < ROW_BLOCK:
        token = tl.sum(tl.where(rows == row, sampled, 0), axis=0)
        emitted = tl.where(rows == count, token, emitted)
        path = tl.where(rows == count, row, path)
        count += 1
        # A parent is above its children, so this ends; ROW_BLOCK: no child.
        is_child = (parents == row) & (drafted == token) & (rows > row)
        row = tl.min(tl.where(is_child, rows, ROW_BLOCK), axis=0)
    in_row = rows < NUM_ROWS
    tl.store(path_ptr + req * NUM_ROWS + rows, path, mask=in_row)
    tl.store(emitted_ptr + req * emitted_stride + rows, emitted, mask=in_row)
    tl.store(num_emitted_ptr + req, count)


def verify_tree(
    buffers: TreeBuffers,
    # [num_logits] int64, the token the target's sampler drew at each logits row
    sampled: torch.Tensor,
    # [num_logits] int32/int64, the token fed into each row; < 0: placeholder
    drafted: torch.Tensor,
    # [num_reqs] int32/int64 batch row -> request slot; < 0: idle row, accepts nothing
    idx_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    cu_num_logits: torch.Tensor,
    # [num_reqs, 1 + N] int64, out: tokens to emit
    emitted: torch.Tensor,
    # [num_reqs] int32, out: how many of them
    num_emitted: torch.Tensor,
) -> None:
    """Accept the child that equals the drawn token until none does.

    The contract is that of ``vllm_mtp.reference.tree_verify``. Mutates
    ``buffers.path``, ``emitted`` and ``num_emitted``.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    num_reqs, num_rows = idx_mapping.shape[0], buffers.shape.num_rows
    like = buffers.parents
    check_tensor("sampled", sampled, INDEX_DTYPES, (0,), like)
    check_tensor("drafted", drafted, INDEX_DTYPES, (sampled.shape[0],), like)
    check_tensor("idx_mapping", idx_mapping, INDEX_DTYPES, (0,), like)
    check_tensor("cu_num_logits", cu_num_logits, INDEX_DTYPES, (num_reqs + 1,), like)
    check_tensor("emitted", emitted, (torch.int64,), (num_reqs, num_rows), like)
    check_tensor("num_emitted", num_emitted, (torch.int32,), (num_reqs,), like)
    if num_reqs == 0:
        return
    _walk_tree_kernel[(num_reqs,)](
        sampled,
        drafted,
        idx_mapping,
        cu_num_logits,
        buffers.parents,
        buffers.path,
        emitted,
        emitted.stride(0),
        num_emitted,
        NUM_ROWS=num_rows,
        ROW_BLOCK=triton.next_power_of_2(num_rows),
        num_warps=1,
    )
