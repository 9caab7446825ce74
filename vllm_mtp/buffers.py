"""Every persistent device buffer of the plugin, sized once, shape beside each.

CUDA graphs replay with the addresses seen at capture, so these tensors are allocated
once per worker and only ever filled in place.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_mtp.config import TreeShape


@dataclass(frozen=True)
class TreeBuffers:
    """Device state of draft trees in one worker.

    Tensors "by slot" are indexed by vLLM's request slot (``idx_mapping``), so they
    outlive a step; tensors "by batch row" describe the batch being drafted.
    """

    shape: TreeShape

    # --- the packed tree of each request, by slot; row 0 is the root ---
    # [max_num_reqs, 1 + N] int32, row of the parent, -1 for root and padding
    parents: torch.Tensor
    # [max_num_reqs, 1 + N] int32, edges to the root
    depths: torch.Tensor
    # [max_num_reqs, 1 + N] int64, ancestor bits
    masks: torch.Tensor
    # [max_num_reqs, 1 + N] float32, cumulative log-probability of acceptance
    scores: torch.Tensor
    # [max_num_reqs] bool, True: this request drafts a chain (see docs/configuration)
    chain_only: torch.Tensor

    # --- the verify pass being run, by query row ---
    # [max_num_tokens] int64, ancestor bits; causal bits for rows without a tree
    row_masks: torch.Tensor
    # [max_num_reqs, 1 + N] int32, rows on the accepted path, root first
    path: torch.Tensor

    # --- candidates of the drafting in progress, by batch row ---
    # C = shape.num_candidates
    # [max_num_reqs, C] int64
    cand_tokens: torch.Tensor
    # [max_num_reqs, C] float32, -inf: not a candidate
    cand_scores: torch.Tensor
    # [max_num_reqs, C] int32, candidate index of the parent, -1: child of the root
    cand_parents: torch.Tensor
    # [max_num_reqs, F] int32, candidate index of each node being expanded
    frontier: torch.Tensor
    # [max_num_reqs * F, k] int64 and float32: children found for each frontier node
    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    # [max_num_reqs * F] int64, ancestor bits of each frontier node in the scratch rows
    scratch_masks: torch.Tensor


def build_tree_buffers(
    shape: TreeShape, max_num_reqs: int, max_num_tokens: int, device: torch.device
) -> TreeBuffers:
    """Allocate every buffer; the causal and root-only defaults are valid trees."""
    rows, k, cand = shape.num_rows, shape.topk, shape.num_candidates
    level = max_num_reqs * shape.frontier
    i32: Any = {"dtype": torch.int32, "device": device}
    i64: Any = {"dtype": torch.int64, "device": device}
    f32: Any = {"dtype": torch.float32, "device": device}
    return TreeBuffers(
        shape=shape,
        parents=torch.full((max_num_reqs, rows), -1, **i32),
        depths=torch.zeros((max_num_reqs, rows), **i32),
        masks=torch.ones((max_num_reqs, rows), **i64),
        scores=torch.zeros((max_num_reqs, rows), **f32),
        chain_only=torch.zeros(max_num_reqs, dtype=torch.bool, device=device),
        row_masks=torch.ones(max_num_tokens, **i64),
        path=torch.zeros((max_num_reqs, rows), **i32),
        cand_tokens=torch.zeros((max_num_reqs, cand), **i64),
        cand_scores=torch.full((max_num_reqs, cand), float("-inf"), **f32),
        cand_parents=torch.full((max_num_reqs, cand), -1, **i32),
        frontier=torch.zeros((max_num_reqs, shape.frontier), **i32),
        topk_ids=torch.zeros((level, k), **i64),
        topk_logprobs=torch.zeros((level, k), **f32),
        scratch_masks=torch.ones(level, **i64),
    )
