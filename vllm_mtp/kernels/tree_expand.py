"""EAGLE-2 expansion: from the children found at one level to the next frontier.

``_expand_frontier_kernel``, grid (num_reqs,), scores the children of one request,
stores them as candidates and picks the next frontier. ``_gather_hidden_kernel``, grid
(num_reqs * F, slices of H), copies the hidden states that the frontier needs, which is
all the memory that matters here: 2 * F * H elements per request.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.config import candidates
from vllm_mtp.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_tensor
from vllm_mtp.kernels.ranking import float_to_key, lowest_key, take_best

HIDDEN_BLOCK = 2048
"""Elements of a hidden state that one program copies."""


@triton.jit(do_not_specialize=["first", "first_bit"])
def _expand_frontier_kernel(
    idx_mapping_ptr,
    # [max_num_reqs] bool by slot
    chain_only_ptr,
    # [max_num_reqs * F, K]
    topk_ids_ptr,
    topk_logprobs_ptr,
    # [max_num_reqs, C]
    cand_tokens_ptr,
    cand_scores_ptr,
    cand_parents_ptr,
    cand_stride,
    # [max_num_reqs, >= F]
    frontier_ptr,
    frontier_stride,
    # [max_num_reqs * F]
    scratch_masks_ptr,
    # [max_num_tokens] int32
    input_ids_ptr,
    # candidate index of this level's first child
    first,
    # scratch row of the next frontier's first node
    first_bit,
    K: tl.constexpr,
    F: tl.constexpr,
    F_BLOCK: tl.constexpr,
    CHILD_BLOCK: tl.constexpr,
    IS_ROOT: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """Grid (num_reqs,): candidates and next frontier of one request."""
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    is_chain = tl.load(chain_only_ptr + slot, mask=slot >= 0, other=0) != 0
    NUM_CHILDREN: tl.constexpr = K if IS_ROOT else F * K
    child = tl.arange(0, CHILD_BLOCK)
    is_child = child < NUM_CHILDREN
    node = child // K
    rank = child % K
    topk_row = req if IS_ROOT else req * F
    front = frontier_ptr + req * frontier_stride
    logprobs = tl.load(
        topk_logprobs_ptr + topk_row * K + child, mask=is_child, other=float("-inf")
    )
    tokens = tl.load(topk_ids_ptr + topk_row * K + child, mask=is_child, other=0)
    if IS_ROOT:
        parents = tl.full([CHILD_BLOCK], -1, tl.int32)
        scores = logprobs
    else:
        parents = tl.load(front + node, mask=is_child, other=0)
        scores = logprobs + tl.load(
            cand_scores_ptr + req * cand_stride + parents, mask=is_child, other=0.0
        )
    is_dropped = (scores != scores) | (rank >= tl.where(is_chain, 1, K))
    scores = tl.where(is_dropped, float("-inf"), scores)
    cand = req * cand_stride + first + child
    tl.store(cand_tokens_ptr + cand, tokens, mask=is_child)
    tl.store(cand_scores_ptr + cand, scores, mask=is_child)
    tl.store(cand_parents_ptr + cand, parents, mask=is_child)
    if not IS_LAST:
        lanes = tl.arange(0, F_BLOCK)
        in_frontier = lanes < F
        keys = float_to_key(scores)
        keys = tl.where(is_child, keys, lowest_key(keys))
        chosen = tl.zeros([F_BLOCK], tl.int32)
        for j in range(F):
            _, best, keys = take_best(keys, child, CHILD_BLOCK)
            chosen = tl.where(lanes == j, best, chosen)
        bits = tl.full([F_BLOCK], 1, tl.int64) << (first_bit + lanes).to(tl.int64)
        if not IS_ROOT:
            bits |= tl.load(
                scratch_masks_ptr + req * F + chosen // K, mask=in_frontier, other=0
            )
        ids = tl.load(topk_ids_ptr + topk_row * K + chosen, mask=in_frontier, other=0)
        # The frontier and its masks were read above and are replaced below.
        tl.debug_barrier()
        tl.store(front + lanes, first + chosen, mask=in_frontier)
        tl.store(scratch_masks_ptr + req * F + lanes, bits, mask=in_frontier)
        tl.store(input_ids_ptr + req * F + lanes, ids.to(tl.int32), mask=in_frontier)


@triton.jit(do_not_specialize=["first"])
def _gather_hidden_kernel(
    # [max_num_reqs, >= F] int32
    frontier_ptr,
    frontier_stride,
    hidden_in_ptr,
    hidden_in_stride,
    hidden_out_ptr,
    hidden_out_stride,
    hidden_size,
    first,
    K: tl.constexpr,
    F: tl.constexpr,
    IS_ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_reqs * F, slices of H): one slice of one frontier node's hidden state.

    Frontier node ``j`` gets the state of the row it is a child of.
    """
    row = tl.program_id(0).to(tl.int64)
    req = row // F
    source = req
    if not IS_ROOT:
        node = tl.load(frontier_ptr + req * frontier_stride + row % F)
        source = req * F + (node - first) // K
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < hidden_size
    hidden = tl.load(hidden_in_ptr + source * hidden_in_stride + offsets, mask=mask)
    tl.store(hidden_out_ptr + row * hidden_out_stride + offsets, hidden, mask=mask)


def expand_tree(
    buffers: TreeBuffers,
    # depth of the children in topk_ids: 1..S
    depth: int,
    # [num_reqs] int32/int64 batch row -> request slot; < 0: idle row
    idx_mapping: torch.Tensor,
    # [num_reqs] (depth 1) or [num_reqs * F, H]: hidden state that made each row's
    # children
    hidden_in: torch.Tensor,
    # [max_num_tokens, H], out: hidden state of each next frontier row
    hidden_out: torch.Tensor,
    # [max_num_tokens] int32, out: token of each next frontier row
    input_ids: torch.Tensor,
    # F, nodes expanded per level; None: as many as there is room for
    frontier: int | None = None,
) -> None:
    """Store the children as candidates and make the best F the next frontier.

    The contract is that of ``vllm_mtp.reference.tree_expand``; ``hidden_in`` and
    ``hidden_out`` have to be different memory. Mutates ``buffers``, ``hidden_out`` and
    ``input_ids``. Source: EAGLE-2, arXiv 2406.16858, section 4.1.

    Raises:
        ValueError: A shape, dtype, device, depth or frontier does not fit.
    """
    num_reqs, shape = idx_mapping.shape[0], buffers.shape
    frontier = shape.frontier if frontier is None else frontier
    k, is_root, is_last = shape.topk, depth == 1, depth == shape.num_steps
    like = buffers.cand_scores
    if not 1 <= depth <= shape.num_steps:
        raise ValueError(f"depth: {depth}, expected 1 to {shape.num_steps}")
    if not 1 <= frontier <= shape.frontier:
        raise ValueError(f"frontier: {frontier}, expected 1 to {shape.frontier}")
    check_tensor("idx_mapping", idx_mapping, INDEX_DTYPES, (0,), like)
    if num_reqs == 0:
        return
    first = 0 if is_root else candidates(depth - 1, k, frontier)
    num_children = k if is_root else frontier * k
    if not is_last:
        rows_out = num_reqs * frontier
        rows_in = num_reqs if is_root else rows_out
        check_tensor("hidden_in", hidden_in, FLOAT_DTYPES, (rows_in, 1), like)
        hidden_size = hidden_in.shape[1]
        check_tensor(
            "hidden_out",
            hidden_out,
            (hidden_in.dtype,),
            (rows_out, hidden_size),
            like,
        )
        check_tensor("input_ids", input_ids, (torch.int32,), (rows_out,), like)
        if hidden_in.data_ptr() == hidden_out.data_ptr():
            raise ValueError("hidden_out: has to be other memory than hidden_in")
    _expand_frontier_kernel[(num_reqs,)](
        idx_mapping,
        buffers.chain_only,
        buffers.topk_ids,
        buffers.topk_logprobs,
        buffers.cand_tokens,
        buffers.cand_scores,
        buffers.cand_parents,
        buffers.cand_scores.stride(0),
        buffers.frontier,
        buffers.frontier.stride(0),
        buffers.scratch_masks,
        input_ids,
        first,
        (depth - 1) * frontier,
        K=k,
        F=frontier,
        F_BLOCK=triton.next_power_of_2(frontier),
        CHILD_BLOCK=triton.next_power_of_2(num_children),
        IS_ROOT=is_root,
        IS_LAST=is_last,
        num_warps=1 if k <= 8 else 4,
    )
    if is_last:
        return
    block = min(triton.next_power_of_2(hidden_size), HIDDEN_BLOCK)
    _gather_hidden_kernel[(rows_out, triton.cdiv(hidden_size, block))](
        buffers.frontier,
        buffers.frontier.stride(0),
        hidden_in,
        hidden_in.stride(0),
        hidden_out,
        hidden_out.stride(0),
        hidden_size,
        first,
        K=k,
        F=frontier,
        IS_ROOT=is_root,
        BLOCK=block,
        num_warps=4,
    )
