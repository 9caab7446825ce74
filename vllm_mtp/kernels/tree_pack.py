"""EAGLE-2 reranking: the best N candidates become the packed tree.

One launch, one program per request. N rounds take the best candidate from registers,
then parents, depths and ancestor bits follow by comparing the N chosen with each other.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.kernels.checks import INDEX_DTYPES, check_tensor
from vllm_mtp.kernels.ranking import float_to_key, lowest_key, take_best


@triton.jit
def _pack_tree_kernel(
    idx_mapping_ptr,
    # [max_num_reqs, C] by batch row
    cand_tokens_ptr,
    cand_scores_ptr,
    cand_parents_ptr,
    cand_stride,
    # [max_num_reqs, NUM_ROWS] by slot
    parents_ptr,
    depths_ptr,
    masks_ptr,
    scores_ptr,
    # [num_reqs, NUM_ROWS - 1]
    draft_tokens_ptr,
    draft_tokens_stride,
    NUM_CANDIDATES: tl.constexpr,
    CAND_BLOCK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    """Grid (num_reqs,): the packed tree of one request. Lane ``i`` is row ``i``."""
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    cands = tl.arange(0, CAND_BLOCK)
    is_cand = cands < NUM_CANDIDATES
    cand_scores = tl.load(
        cand_scores_ptr + req * cand_stride + cands,
        mask=is_cand,
        other=float("-inf"),
    )
    keys = float_to_key(cand_scores)
    keys = tl.where(is_cand, keys, lowest_key(keys))
    rows = tl.arange(0, ROW_BLOCK)
    # -1 is the candidate index that children of the root name as their parent.
    chosen = tl.full([ROW_BLOCK], -1, tl.int32)
    for row in range(1, NUM_ROWS):
        _, best, keys = take_best(keys, cands, CAND_BLOCK)
        chosen = tl.where(rows == row, best, chosen)

    is_node = (rows > 0) & (rows < NUM_ROWS)
    cand = req * cand_stride + chosen
    scores = tl.load(cand_scores_ptr + cand, mask=is_node, other=0.0)
    tokens = tl.load(cand_tokens_ptr + cand, mask=is_node, other=0)
    parent_cands = tl.load(cand_parents_ptr + cand, mask=is_node, other=-1)
    is_real = is_node & (scores > float("-inf"))

    # Row of each row's parent; padding hangs below the root, lanes past the tree too.
    is_parent = (chosen[None, :] == parent_cands[:, None]) & (rows[None, :] < NUM_ROWS)
    parents = tl.sum(tl.where(is_parent, rows[None, :], 0), axis=1)
    parents = tl.where(is_real, parents, 0)
    bits = tl.full([ROW_BLOCK], 1, tl.int64) << rows.to(tl.int64)
    masks = bits | 1
    depths = tl.where(rows > 0, 1, 0)
    ancestors = parents
    for _ in range(NUM_STEPS - 1):
        # A root that is its own ancestor ends the climb.
        masks |= tl.full([ROW_BLOCK], 1, tl.int64) << ancestors.to(tl.int64)
        depths += tl.where(ancestors > 0, 1, 0)
        is_next = ancestors[:, None] == rows[None, :]
        ancestors = tl.sum(tl.where(is_next, parents[None, :], 0), axis=1)

    tl.store(
        draft_tokens_ptr + req * draft_tokens_stride + rows - 1, tokens, mask=is_node
    )
    row_in_slot = slot * NUM_ROWS + rows
    is_stored = rows < tl.where(slot >= 0, NUM_ROWS, 0)
    tl.store(parents_ptr + row_in_slot, tl.where(is_real, parents, -1), mask=is_stored)
    tl.store(depths_ptr + row_in_slot, depths, mask=is_stored)
    tl.store(masks_ptr + row_in_slot, masks, mask=is_stored)
    tl.store(scores_ptr + row_in_slot, scores, mask=is_stored)


def pack_tree(
    buffers: TreeBuffers,
    # [num_reqs] int32/int64 batch row -> request slot; < 0: idle row, nothing by slot
    # written
    idx_mapping: torch.Tensor,
    # [>= num_reqs, N] int64, out: drafted tokens in row order
    draft_tokens: torch.Tensor,
) -> None:
    """Keep the N best candidates of each request, best first, parents before children.

    The contract is that of ``vllm_mtp.reference.tree_pack``. Mutates the by-slot
    tensors of ``buffers`` and ``draft_tokens``. Source: EAGLE-2, arXiv 2406.16858,
    section 4.2.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    num_reqs, shape = idx_mapping.shape[0], buffers.shape
    like = buffers.cand_scores
    check_tensor("idx_mapping", idx_mapping, INDEX_DTYPES, (0,), like)
    check_tensor(
        "draft_tokens", draft_tokens, (torch.int64,), (num_reqs, shape.num_nodes), like
    )
    if num_reqs == 0:
        return
    cand_block = triton.next_power_of_2(shape.num_candidates)
    _pack_tree_kernel[(num_reqs,)](
        idx_mapping,
        buffers.cand_tokens,
        buffers.cand_scores,
        buffers.cand_parents,
        buffers.cand_scores.stride(0),
        buffers.parents,
        buffers.depths,
        buffers.masks,
        buffers.scores,
        draft_tokens,
        draft_tokens.stride(0),
        NUM_CANDIDATES=shape.num_candidates,
        CAND_BLOCK=cand_block,
        NUM_ROWS=shape.num_rows,
        ROW_BLOCK=triton.next_power_of_2(shape.num_rows),
        NUM_STEPS=shape.num_steps,
        num_warps=1 if cand_block <= 512 and shape.num_rows <= 16 else 4,
    )
