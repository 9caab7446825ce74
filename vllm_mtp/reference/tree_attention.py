"""Attention of tree rows: everything before the root, then the row's own ancestors.

The MLA case is attention with one KV head (MQA) in the latent space: query and key
are 512 latent plus 64 RoPE numbers, the value is the latent part of the key. The same
functions serve GQA with separate values.
"""

import torch


def tree_suffix_attention(
    # [num_rows, H, Dk] query rows, in request order
    query: torch.Tensor,
    # [num_slots, H_kv, Dk] key of every physical slot
    key: torch.Tensor,
    # [num_slots, H_kv, Dv] value of every physical slot (MLA: key[..., :512])
    value: torch.Tensor,
    # [num_reqs + 1] int32 first query row of each request
    query_start_loc: torch.Tensor,
    # [num_rows] int64: bit j set = the row attends to suffix row j of its request
    row_masks: torch.Tensor,
    # suffix row j of request r is slot suffix_slots[suffix_start[r] + j];
    # [num_reqs] int32
    suffix_start: torch.Tensor,
    # [*] int64 physical slots
    suffix_slots: torch.Tensor,
    # number of suffix rows looked at, 1..64; bits at or above are ignored
    max_suffix: int,
    # [num_rows, H, Dv] attention over the prefix, normalised; ignored where lse = -inf
    prefix_out: torch.Tensor,
    # [num_rows, H] float32 natural-log sum of exp of the scaled prefix scores; -inf:
    # no prefix
    prefix_lse: torch.Tensor,
    # multiplies the scores
    scale: float,
) -> torch.Tensor:
    """Attend to the suffix rows allowed by ``row_masks`` and merge with the prefix.

    Returns ``[num_rows, H, Dv]`` in the dtype of ``prefix_out``; computed in float32.
    A row with no allowed suffix row and no prefix gives zeros. Slots whose bit is
    clear are never read, whatever they hold (NaN, -1, out of range).
    """
    num_heads = query.shape[1]
    group = num_heads // key.shape[1]
    out = torch.zeros_like(prefix_out)
    for r in range(query_start_loc.shape[0] - 1):
        for row in range(int(query_start_loc[r]), int(query_start_loc[r + 1])):
            bits = int(row_masks[row])
            ids = [j for j in range(max_suffix) if (bits >> j) & 1]
            slots = suffix_slots[int(suffix_start[r]) + torch.tensor(ids).long()].long()
            for h in range(num_heads):
                keys = key[slots, h // group].float()
                values = value[slots, h // group].float()
                scores = (keys @ query[row, h].float()) * scale
                prefix = prefix_lse[row, h].float()
                lse = torch.logsumexp(torch.cat([scores, prefix[None]]), dim=0)
                if lse == float("-inf"):
                    continue
                merged = torch.exp(scores - lse) @ values
                if prefix > float("-inf"):
                    merged += torch.exp(prefix - lse) * prefix_out[row, h].float()
                out[row, h] = merged.to(out.dtype)
    return out


def paged_prefix_attention(
    # [num_rows, H, Dk]
    query: torch.Tensor,
    # [num_blocks, block_size, Dk] paged latent cache (one KV head)
    kv_cache: torch.Tensor,
    # [num_reqs, max_blocks] int32; entries past the prefix are never read
    block_table: torch.Tensor,
    # [num_reqs] int32 tokens before the root
    prefix_lens: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # Dv: the value is the first Dv numbers of the key
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend every row to all ``prefix_lens`` tokens of its request, without a mask.

    Returns the normalised output ``[num_rows, H, Dv]`` in query dtype and the float32
    natural-log sum of exp ``[num_rows, H]``; zeros and -inf for an empty prefix.
    """
    num_rows, num_heads, _ = query.shape
    block_size = kv_cache.shape[1]
    out = query.new_zeros(num_rows, num_heads, value_dim)
    lse = torch.full(
        (num_rows, num_heads), float("-inf"), dtype=torch.float32, device=query.device
    )
    for r in range(query_start_loc.shape[0] - 1):
        start, end = int(query_start_loc[r]), int(query_start_loc[r + 1])
        length = int(prefix_lens[r])
        if length <= 0 or end == start:
            continue
        blocks = block_table[r, : -(-length // block_size)].long()
        keys = kv_cache[blocks].flatten(0, 1)[:length].float()
        scores = torch.einsum("qhd,td->qht", query[start:end].float(), keys) * scale
        lse[start:end] = torch.logsumexp(scores, dim=-1)
        probs = torch.softmax(scores, dim=-1)
        values = torch.einsum("qht,td->qhd", probs, keys[:, :value_dim])
        out[start:end] = values.to(out.dtype)
    return out, lse
