"""EAGLE-2 expansion: from the children found at one level to the next frontier."""

import torch

from vllm_mtp.buffers import TreeBuffers


def expand_tree(
    buffers: TreeBuffers,
    # depth of the children in topk_ids: 1..S
    depth: int,
    # [num_reqs] int64 batch row -> request slot; < 0: idle row
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

    At depth 1 each request has k children of the root in row ``r`` of
    ``buffers.topk_ids``; deeper, frontier node ``j`` has its k children in row
    ``r * F + j``. A child's score is its parent's plus its log-probability, NaN
    counts as -inf, and for ``chain_only`` requests every child but the best gets
    -inf. Candidates of depth 1 are indices 0..k-1, those of depth d are
    ``k + (d - 2) * F * k + j * k + i``. The F best of this depth, ties lower index
    first, become the frontier: their candidate index, token, hidden state (that of
    the row they are children of) and ancestor bits over scratch rows, where frontier
    node ``j`` of depth d is scratch row ``(d - 1) * F + j``. At the last depth S only
    candidates are stored. Source: EAGLE-2, arXiv 2406.16858, section 4.1.
    """
    shape = buffers.shape
    k, width = shape.topk, shape.frontier if frontier is None else frontier
    first = 0 if depth == 1 else k + (depth - 2) * width * k
    for r in range(idx_mapping.shape[0]):
        slot = int(idx_mapping[r])
        chain = slot >= 0 and bool(buffers.chain_only[slot])
        rows = [r] if depth == 1 else [r * width + j for j in range(width)]
        scores, sources, old_masks = [], [], buffers.scratch_masks.clone()
        for j, row in enumerate(rows):
            parent = -1 if depth == 1 else int(buffers.frontier[r, j])
            base = 0.0 if depth == 1 else float(buffers.cand_scores[r, parent])
            for i in range(k):
                cand = first + j * k + i
                score = base + float(buffers.topk_logprobs[row, i])
                if score != score or (chain and i > 0):
                    score = float("-inf")
                buffers.cand_tokens[r, cand] = buffers.topk_ids[row, i]
                buffers.cand_scores[r, cand] = score
                buffers.cand_parents[r, cand] = parent
                scores.append(float(buffers.cand_scores[r, cand]))
                sources.append(j)
        if depth == shape.num_steps:
            continue
        best = sorted(range(len(scores)), key=lambda c: (-scores[c], c))[:width]
        for j, c in enumerate(best):
            row = r * width + j
            inherited = 0 if depth == 1 else int(old_masks[r * width + sources[c]])
            buffers.frontier[r, j] = first + c
            bit = (depth - 1) * width + j
            # Bit 63 is the sign bit of int64.
            signed = (1 << bit) - (1 << 64) if bit == 63 else 1 << bit
            buffers.scratch_masks[row] = inherited | signed
            hidden_out[row] = hidden_in[rows[sources[c]]]
            input_ids[row] = buffers.cand_tokens[r, first + c]
