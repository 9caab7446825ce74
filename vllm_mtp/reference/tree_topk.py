"""Best children of each node from its draft logits."""

from collections.abc import Callable

import torch

GumbelFn = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(seed, position, token ids [V]) -> float32 noise [V]."""


def tree_topk(
    # [num_rows, V] float32/bfloat16/float16 draft logits
    logits: torch.Tensor,
    # [>= num_rows, k] int64, out: token ids, best first
    topk_ids: torch.Tensor,
    # [>= num_rows, k] float32, out: log-probability of each
    topk_logprobs: torch.Tensor,
    # [num_reqs] int64 batch row -> request slot; < 0: idle row, treated as greedy
    idx_mapping: torch.Tensor,
    # [max_num_reqs] float32 by slot; 0 is greedy
    temperature: torch.Tensor,
    # [max_num_reqs] int64 by slot
    seeds: torch.Tensor,
    # [num_reqs] int64 by batch row: position of the token before the root's child
    positions: torch.Tensor,
    # added to positions: depth of the nodes whose children are sought
    depth: int,
    gumbel: GumbelFn,
) -> None:
    """Write the k best next tokens of each row and their log-probabilities.

    Row ``r`` belongs to batch row ``r // (num_rows // num_reqs)``. With temperature
    T > 0 a row is ranked by ``logits / T + gumbel(seed, position + depth, token)``,
    the noise the target's sampler will use there; with T = 0 by the logits. The
    log-probability is the log-softmax of what was ranked. Ties rank the lower token
    first. NaN counts as -inf, and a row without a finite logit gives tokens 0..k-1
    with log-probability -inf. Mutates ``topk_ids`` and ``topk_logprobs``.
    """
    num_rows, vocab_size = logits.shape
    k = topk_ids.shape[1]
    rows_per_req = num_rows // idx_mapping.shape[0]
    tokens = torch.arange(vocab_size, device=logits.device)
    for row in range(num_rows):
        req = row // rows_per_req
        slot = int(idx_mapping[req])
        values = logits[row].float()
        values = torch.where(values.isnan(), float("-inf"), values)
        temp = float(temperature[slot]) if slot >= 0 else 0.0
        if temp > 0:
            noise = gumbel(int(seeds[slot]), int(positions[req]) + depth, tokens)
            values = values / temp + noise
        order = torch.sort(values, descending=True, stable=True).indices[:k]
        best = values[order]
        logprobs = best - torch.logsumexp(values, dim=0)
        topk_ids[row] = order
        topk_logprobs[row] = torch.where(logprobs.isnan(), float("-inf"), logprobs)
