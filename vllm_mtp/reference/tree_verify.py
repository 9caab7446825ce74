"""Walk each tree along the tokens the target drew."""

import torch

from vllm_mtp.buffers import TreeBuffers


def verify_tree(
    buffers: TreeBuffers,
    # [num_logits] int64, the token the target's sampler drew at each logits row
    sampled: torch.Tensor,
    # [num_logits] int64, the token fed into each row; < 0: placeholder, never accepted
    drafted: torch.Tensor,
    # [num_reqs] int64 batch row -> request slot; < 0: idle row, accepts no draft
    idx_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    cu_num_logits: torch.Tensor,
    # [num_reqs, 1 + N] int64, out: tokens to emit
    emitted: torch.Tensor,
    # [num_reqs] int32, out: how many of them
    num_emitted: torch.Tensor,
) -> None:
    """Accept the child that equals the drawn token until none does.

    Starts at the root; the token drawn at the last accepted row is emitted as the
    extra token, so a request emits 1 + (accepted rows). If siblings carry the same
    token, the lowest row wins. Writes the accepted rows, root first, to
    ``buffers.path`` by batch row; entries past ``num_emitted`` are the identity, so
    that moving along the path leaves the other rows where they are. Entries of
    ``emitted`` past ``num_emitted`` are 0. A request without logits rows emits nothing.
    Greedy or sampled makes no difference: the draw was made before. Source: Daliri et
    al., arXiv 2408.07978.
    """
    num_rows = emitted.shape[1]
    for r in range(idx_mapping.shape[0]):
        start, end = int(cu_num_logits[r]), int(cu_num_logits[r + 1])
        slot = int(idx_mapping[r])
        row, count = 0, 0
        emitted[r] = 0
        buffers.path[r] = torch.arange(num_rows, dtype=torch.int32)
        while row < end - start:
            token = int(sampled[start + row])
            emitted[r, count] = token
            buffers.path[r, count] = row
            count += 1
            children = [
                c
                for c in range(row + 1, end - start)
                if slot >= 0
                and int(buffers.parents[slot, c]) == row
                and int(drafted[start + c]) == token >= 0
            ]
            if not children:
                break
            row = children[0]
        num_emitted[r] = count
