"""Move what the accepted path left behind to the front of its request."""

from collections.abc import Sequence

import torch


def commit_kv(
    # per layer: [num_blocks, block_size, ...] paged cache of any dtype
    kv_caches: Sequence[torch.Tensor],
    # per layer: index into slot_mappings
    layer_groups: Sequence[int],
    # [num_groups, num_tokens] int64 physical slot of each query row, -1: none
    slot_mappings: torch.Tensor,
    # [num_reqs, 1 + N] int32 accepted rows, root first
    path: torch.Tensor,
    # [num_reqs] int32 how many rows of path are accepted, root included
    num_accepted: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
) -> None:
    """Copy the cache entry of row ``path[j]`` to row ``j``, j = 1, 2, ...

    ``path[j] >= j`` and the path rises, so in path order no row is overwritten before
    it was read. Entries are copied bit for bit. Mutates the caches.
    """
    for cache, group in zip(kv_caches, layer_groups, strict=True):
        flat = cache.flatten(0, 1)
        for r in range(num_accepted.shape[0]):
            start = int(query_start_loc[r])
            for j in range(1, int(num_accepted[r])):
                source = int(slot_mappings[group, start + int(path[r, j])])
                target = int(slot_mappings[group, start + j])
                if source >= 0 and target >= 0 and source != target:
                    flat[target] = flat[source].clone()


def commit_rows(
    # [num_reqs, 1 + N] int32 accepted rows, root first
    path: torch.Tensor,
    # [num_reqs] int32
    num_accepted: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_tokens, H], in place
    hidden_states: torch.Tensor,
    # [num_tokens] int32, in place
    input_ids: torch.Tensor,
    # [num_tokens] int64, in place: root position + depth in, linear out
    positions: torch.Tensor,
) -> None:
    """Move hidden states and token ids along the path; make positions linear again.

    Only rows 1..num_accepted-1 move. Afterwards accepted row ``j`` has position
    ``root position + j``; rows past the accepted ones keep stale values, exactly as
    the rejected rows of a chain step do.
    """
    for r in range(num_accepted.shape[0]):
        start = int(query_start_loc[r])
        for j in range(1, int(num_accepted[r])):
            source = start + int(path[r, j])
            hidden_states[start + j] = hidden_states[source].clone()
            input_ids[start + j] = input_ids[source].clone()
            positions[start + j] = positions[start] + j
