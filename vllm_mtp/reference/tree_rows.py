"""Positions and attention masks of the rows of a verify pass."""

import torch

from vllm_mtp.buffers import TreeBuffers


def prepare_tree_rows(
    buffers: TreeBuffers,
    # [num_reqs] int64 batch row -> request slot; < 0: idle row, no tree
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

    A request is verified as a tree when it has drafts and its first row lies past its
    prefill (drafts of a prefilling request are placeholders). Every other row keeps
    its position and gets causal bits; rows past the 64th of a request are prefill rows
    and get no meaningful bits. Mutates ``positions`` and ``buffers.row_masks``.
    """
    for r in range(idx_mapping.shape[0]):
        start, end = int(query_start_loc[r]), int(query_start_loc[r + 1])
        num_drafts = int(cu_num_logits[r + 1]) - int(cu_num_logits[r]) - 1
        slot = int(idx_mapping[r])
        base = int(positions[start]) if end > start else 0
        is_tree = slot >= 0 and num_drafts > 0 and base >= int(prefill_len[slot])
        for i in range(min(end - start, 64)):
            causal = (1 << (i + 1)) - 1
            causal = causal - (1 << 64) if causal >= 1 << 63 else causal
            if is_tree:
                positions[start + i] = base + int(buffers.depths[slot, i])
                buffers.row_masks[start + i] = buffers.masks[slot, i]
            else:
                buffers.row_masks[start + i] = causal
