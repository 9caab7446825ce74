"""Best children of each node from its draft logits."""

from collections.abc import Callable

import torch

ODDS_SLOPE = 1.15
ODDS_SHIFT = 0.5
"""From the odds that the draft gives a token to the odds that the target draws it, as
logarithms; chosen after reliability tables of the tiny model's trees, without any
correction (docs/benchmarks.md, calibration, has the tables with it)."""

LEAST_MISS = 1e-6
"""Chance of another token that even the surest draft is taken to leave."""

GumbelFn = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(seed, position, token ids [V]) -> float32 noise [V]."""


def tree_topk(
    # [num_rows, V] float32/bfloat16/float16 draft logits
    logits: torch.Tensor,
    # [>= num_rows, k] int64, out: token ids, best first
    topk_ids: torch.Tensor,
    # [>= num_rows, k] float32, out: estimated log-chance of acceptance of each
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
    """Write the k best next tokens of each row and their chances of acceptance.

    Row ``r`` belongs to batch row ``r // (num_rows // num_reqs)``. With temperature
    T > 0 a row is ranked by ``logits / T + gumbel(seed, position + depth, token)``,
    the noise the target's sampler will use there; with T = 0 by the logits. The
    chance is the softmax of what was ranked, corrected by ``calibrate``. Ties rank the
    lower token first. NaN counts as -inf, and a row without a finite logit gives tokens
    0..k-1 with log-chance -inf. Mutates ``topk_ids`` and ``topk_logprobs``.
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
        logprobs = torch.where(logprobs.isnan(), float("-inf"), logprobs)
        topk_logprobs[row] = calibrate(logprobs)


def calibrate(
    # float32, log-probability that the draft gives a token
    logprobs: torch.Tensor,
) -> torch.Tensor:
    """Log-chance that the target draws the token: a straight line in log-odds.

    The draft is a little less sure than it should be. The order of tokens stays.
    """
    miss = (1 - logprobs.exp()).clamp(min=LEAST_MISS)
    odds = ODDS_SLOPE * (logprobs - miss.log()) + ODDS_SHIFT
    return torch.nn.functional.logsigmoid(odds)
