"""One node budget for the whole batch: the best drafts of all requests are verified.

Equal trees waste rows on requests whose next tokens are uncertain, and give too few to
those that are predictable. Here a batch of R verifying requests keeps its ``R * N``
best nodes by score, whoever drafted them. Nodes are in order of their scores and
parents before children, so every request keeps a front of its rows.

The scores are on the device, so only the device knows how many each request keeps. The
host plans with the total, which is exact, and with equal shares. It is vLLM's seam for
adaptive verification (``GPUModelRunner.adaptive_verification``); its manager needs the
confidence head of a chain drafter, ours takes the scores of trees.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_mtp import compat
from vllm_mtp.auto.ladder import Rung, nodes_of_step, shared_nodes
from vllm_mtp.buffers import TreeBuffers

Counts = npt.NDArray[np.int32]


class NodeBudget:
    """vLLM's runner asks it for every step that it serves."""

    def __init__(
        self,
        ladder: Iterable[Rung],
        tree: TreeBuffers,
        req_states: Any,
        # [max_num_reqs + 1] int32, the runner's, written here
        query_start_loc: torch.Tensor,
        max_logits: int,
    ) -> None:
        self.nodes_of = shared_nodes(ladder)
        self.tree, self.req_states = tree, req_states
        self.query_start_loc = query_start_loc
        self.cu_num_logits = torch.zeros_like(query_start_loc)
        # Rows that the sampler takes at once. Where a request begins is not known here,
        # so that it cannot be cut into chunks.
        self.max_logits = max_logits
        self.widest = max(self.nodes_of, default=0)
        """Most drafts that a request of a shared batch has."""
        # Of the step at hand: nodes of all requests, those that each may keep, and
        # tokens of each that are no drafts.
        self.budget = 0
        self.limits: dict[str, int] = {}
        self.scheduled: Mapping[str, int] = {}

    def serves(self, scheduler_output: Any) -> bool:
        """Whether the requests of this step share their nodes."""
        return nodes_of_step(self.nodes_of, scheduler_output) > 0

    # --- what a manager is asked and this one need not know -------------------------

    def add_request(self, slot: int) -> None:
        """A request came into ``slot``; its first drafts bring their scores."""

    def record_confidences(self, confidences: Any, input_batch: Any) -> None:
        """Drafts were made; their scores are in ``TreeBuffers.scores``."""

    # --- the step -------------------------------------------------------------------

    def get_num_tokens(
        self,
        num_tokens_per_req: Mapping[str, int],
        draft_tokens: Mapping[str, Sequence[int]],
    ) -> int:
        """Rows of the step, once the batch has dropped its worst nodes.

        None are verified beside drafts that only fill up the row of a prompt: these
        get no rows, and the host could not tell whose rows are missing.
        """
        nodes = self.nodes_of[max(map(len, draft_tokens.values()))]
        filled_up = any(map(self._is_prefilling, draft_tokens))
        self.limits = {
            req_id: 0 if filled_up else len(drafts)
            for req_id, drafts in draft_tokens.items()
        }
        verifying = sum(limit > 0 for limit in self.limits.values())
        self.budget = min(
            nodes * verifying,
            sum(self.limits.values()),
            max(self.max_logits - len(num_tokens_per_req), 0),
        )
        self.scheduled = {
            req_id: count - len(draft_tokens.get(req_id, ()))
            for req_id, count in num_tokens_per_req.items()
        }
        return sum(self.scheduled.values()) + self.budget

    def _is_prefilling(self, req_id: str) -> bool:
        """Whether its drafts are placeholders, as nothing was sampled before them."""
        states = self.req_states
        slot = states.req_id_to_index[req_id]
        computed = states.num_computed_prefill_tokens[slot]
        return bool(computed < states.prefill_len.np[slot])

    def compact_batch(
        self, num_drafts: Counts, num_scheduled: Counts, cu_num_logits: Counts
    ) -> tuple[Counts, Counts]:
        """Rows of each request as the host plans with them, and where logits begin.

        Totals are exact; what a request has is the equal share of what is left.
        """
        kept = np.zeros_like(num_drafts)
        left = self.budget
        while left:
            open_at = np.flatnonzero(kept < num_drafts)[:left]
            kept[open_at] += 1
            left -= len(open_at)
        starts = np.zeros_like(cu_num_logits)
        np.cumsum(kept + 1, out=starts[1:])
        return num_scheduled - num_drafts + kept, starts

    def reallocate_drafts(
        self, req_ids: Sequence[str], idx_mapping: torch.Tensor
    ) -> Any:
        """Where logits and rows of each request begin, and the drafts of all.

        Returns ``cu_num_logits`` [num_reqs + 1] and ``query_start_loc``
        [max_num_reqs + 1], both int32 and filled on the device.
        """
        num_reqs, device = len(req_ids), idx_mapping.device
        limits = [self.limits.get(req_id, 0) for req_id in req_ids]
        kept = keep_best(
            self.tree.scores,
            idx_mapping,
            async_tensor_h2d(np.array(limits, dtype=np.int32), device=device),
            self.budget,
            max(limits),
        )
        before = [self.scheduled[req_id] for req_id in req_ids]
        own = async_tensor_h2d(np.array(before, dtype=np.int32), device=device)
        _running_sum(kept + 1, self.cu_num_logits)
        _running_sum(kept + own, self.query_start_loc)
        self.query_start_loc[num_reqs + 1 :].fill_(sum(before) + self.budget)
        starts = self.cu_num_logits[: num_reqs + 1]
        return compat.budget_answer(starts, self.query_start_loc, self.budget)


def _running_sum(counts: torch.Tensor, out: torch.Tensor) -> None:
    """Write 0 and the running sum of ``counts`` [n] to the front of ``out`` [> n]."""
    out[:1].zero_()
    torch.cumsum(counts, 0, dtype=out.dtype, out=out[1 : len(counts) + 1])


def keep_best(
    # [max_num_reqs, 1 + N] float32 by slot, falling along a row; -inf: padding
    scores: torch.Tensor,
    # [num_reqs]
    idx_mapping: torch.Tensor,
    # [num_reqs] int32, most nodes that a request may keep
    limits: torch.Tensor,
    budget: int,
    widest: int,
) -> torch.Tensor:
    """Nodes that each request keeps when the ``budget`` best of all are kept.

    Args:
        scores: Log-probability of acceptance of every packed node; the root's is 0.
        idx_mapping: Batch row -> request slot.
        limits: At most ``widest``.
        budget: At most the sum of ``limits``.
        widest: Nodes that are looked at.

    Returns:
        ``[num_reqs]`` int32 whose sum is ``budget``. Nothing waits for the device.
    """
    if budget == 0:
        return torch.zeros_like(limits)
    # Padding goes before nodes that must not be kept.
    found = scores[idx_mapping, 1 : widest + 1].clamp(min=-1e30)
    node = torch.arange(found.shape[1], device=found.device)
    found = found.masked_fill(node >= limits[:, None], float("-inf"))
    kept = torch.zeros(found.numel(), dtype=torch.int32, device=found.device)
    kept.index_fill_(0, found.flatten().topk(budget, sorted=False).indices, 1)
    return kept.view_as(found).sum(1, dtype=torch.int32)
