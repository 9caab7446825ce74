"""EAGLE-2 reranking: the best N candidates become the packed tree."""

import torch

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.tree.layout import NO_PARENT


def pack_tree(
    buffers: TreeBuffers,
    # [num_reqs] int64 batch row -> request slot; < 0: idle row, nothing by slot written
    idx_mapping: torch.Tensor,
    # [>= num_reqs, N] int64, out: drafted tokens in row order
    draft_tokens: torch.Tensor,
) -> None:
    """Keep the N best candidates of each request, best first, parents before children.

    Ties keep the lower candidate index first; since a parent scores at least as high
    as its child and has a lower index, it always precedes it. A candidate with score
    -inf is padding: its parent is -1, its depth 1, its mask itself and the root.
    Mutates the by-slot tensors of ``buffers`` and ``draft_tokens``. Source: EAGLE-2,
    arXiv 2406.16858, section 4.2.
    """
    num_nodes = buffers.shape.num_nodes
    for r in range(idx_mapping.shape[0]):
        slot = int(idx_mapping[r])
        scores = buffers.cand_scores[r].tolist()
        best = sorted(range(len(scores)), key=lambda c: (-scores[c], c))[:num_nodes]
        row_of = {NO_PARENT: 0} | {cand: i + 1 for i, cand in enumerate(best)}
        depths, masks = [0], [1]
        parents = [NO_PARENT]
        for i, cand in enumerate(best):
            draft_tokens[r, i] = buffers.cand_tokens[r, cand]
            valid = scores[cand] > float("-inf")
            parent = row_of[int(buffers.cand_parents[r, cand])] if valid else 0
            parents.append(parent if valid else NO_PARENT)
            depths.append(depths[parent] + 1)
            masks.append(masks[parent] | (1 << (i + 1)))
        if slot < 0:
            continue
        device = buffers.parents.device
        # Bit 63 is the sign bit of int64.
        signed = [m - (1 << 64) if m >= 1 << 63 else m for m in masks]
        buffers.parents[slot] = torch.tensor(parents, device=device)
        buffers.depths[slot] = torch.tensor(depths, device=device)
        buffers.masks[slot] = torch.tensor(signed, device=device)
        buffers.scores[slot, 0] = 0.0
        buffers.scores[slot, 1:] = buffers.cand_scores[r, best]
