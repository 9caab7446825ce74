"""The budget of nodes that a batch shares: host and device count the same rows."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from vllm_mtp.auto.ladder import OFF, Rung, build_ladder, ladder_of
from vllm_mtp.auto.sharing import NodeBudget, keep_best
from vllm_mtp.config import MTPConfig, TreeShape

NODES, MAX_REQS = 15, 12
EQUAL = (OFF, Rung(1, 1), Rung(2, 2), Rung(3, 3), Rung(7, 6), Rung(NODES, 6))
LADDER = (*EQUAL, Rung(2, 3, 4), Rung(3, 6, 6), Rung(5, 6, 8))
SHARED = [rung for rung in LADDER if rung.is_shared]
INF = math.inf


# --- keep_best ------------------------------------------------------------------------


def best_total(scores: Any, limits: list[int], budget: int) -> float:
    """The most that fronts of the requests' nodes are worth, by trying all."""
    return max(
        sum(sum(row[:n]) for row, n in zip(scores, fronts, strict=True))
        for fronts in itertools.product(*(range(n + 1) for n in limits))
        if sum(fronts) == budget
    )


def keep(scores: list[list[float]], limits: list[int], budget: int) -> list[int]:
    """``keep_best`` with the requests in slots of another order."""
    count, width = len(scores), len(scores[0])
    slots = torch.tensor([(5 * r + 2) % MAX_REQS for r in range(count)])
    table = torch.full((MAX_REQS, 1 + NODES), 7.0)
    table[slots, 0] = 0.0
    table[slots, 1 : width + 1] = torch.tensor(scores)
    kept = keep_best(
        table, slots, torch.tensor(limits, dtype=torch.int32), budget, max(limits)
    )
    assert kept.dtype == torch.int32
    assert kept.shape == (count,)
    found = kept.tolist()
    assert sum(found) == budget
    assert all(0 <= n <= most for n, most in zip(found, limits, strict=True))
    return found


@pytest.mark.parametrize("seed", range(16))
def test_the_best_fronts_are_kept(seed: int) -> None:
    """Also where many scores are equal."""
    rng = np.random.default_rng(seed)
    count, width = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    scores = -rng.integers(0, 4 if seed % 2 else 1000, (count, width)) / 8
    scores = np.sort(scores, axis=1)[:, ::-1].tolist()
    limits = rng.integers(0, width + 1, count).tolist()
    limits[0] = max(limits[0], 1)
    for budget in range(sum(limits) + 1):
        found = keep(scores, limits, budget)
        total = sum(sum(row[:n]) for row, n in zip(scores, found, strict=True))
        assert total == pytest.approx(best_total(scores, limits, budget))


def test_padding_goes_first() -> None:
    """A chain has padding behind its nodes; that of one is worth that of another."""
    tree, chain = [-1.0, -2.0, -30.0, -40.0], [-5.0, -6.0, -INF, -INF]
    assert keep([tree, chain], [4, 4], 6) == [4, 2]
    assert keep([tree, chain], [4, 4], 7) == [4, 3]
    assert keep([tree, chain], [2, 4], 5) == [2, 3]
    assert keep([chain, chain], [4, 1], 5) == [4, 1]


def test_scores_that_are_no_numbers_break_nothing() -> None:
    bad = [math.nan, math.nan, math.nan]
    assert keep([bad, [-1.0, -2.0, -3.0]], [2, 3], 4) == [2, 2]
    assert sum(keep([bad, bad], [3, 3], 4)) == 4
    assert keep([bad, bad], [1, 3], 4) == [1, 3]


def test_limits() -> None:
    scores = [[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0], [-9.0, -9.0, -9.0]]
    assert keep(scores, [0, 3, 3], 3) == [0, 3, 0]
    assert keep(scores, [0, 0, 3], 2) == [0, 0, 2]
    assert keep(scores, [3, 1, 3], 7) == [3, 1, 3]
    assert keep(scores, [3, 1, 3], 0) == [0, 0, 0]
    assert keep(scores[:1], [3], 2) == [2]


# --- NodeBudget -----------------------------------------------------------------------


class Step:
    """A step of requests: ``(drafts, other tokens, is prefilling)`` each."""

    def __init__(
        self, requests: Sequence[tuple[int, int, bool]], max_logits: int = 4096
    ) -> None:
        count = len(requests)
        rng = np.random.default_rng(count)
        # vLLM puts requests with drafts first.
        self.requests = sorted(requests, key=lambda r: r[0] == 0)
        self.req_ids = [f"r{i}" for i in range(count)]
        slots = rng.permutation(MAX_REQS)[:count]
        self.slots = torch.from_numpy(slots)
        prefill_len, computed = np.zeros((2, MAX_REQS), dtype=np.int32)
        for slot, (_, _, is_prefilling) in zip(slots, self.requests, strict=True):
            prefill_len[slot], computed[slot] = 9, 8 if is_prefilling else 9
        scores = -np.sort(rng.random((MAX_REQS, 1 + NODES), dtype=np.float32))
        states = SimpleNamespace(
            req_id_to_index=dict(zip(self.req_ids, slots.tolist(), strict=True)),
            num_computed_prefill_tokens=computed,
            prefill_len=SimpleNamespace(np=prefill_len),
        )
        tree: Any = SimpleNamespace(scores=torch.from_numpy(scores))
        self.starts = torch.full((MAX_REQS + 1,), -7, dtype=torch.int32)
        self.budget = NodeBudget(LADDER, tree, states, self.starts, max_logits)
        self.drafts = np.array([d for d, _, _ in self.requests], dtype=np.int32)
        own = np.array([n for _, n, _ in self.requests], dtype=np.int32)
        self.tokens = self.drafts + own

    def run(self) -> tuple[int, Any, Any]:
        """Rows of the step, then (rows, logits) of each request, host and device."""
        drafts = {
            req_id: [-1] * int(n)
            for req_id, n in zip(self.req_ids, self.drafts, strict=True)
            if n
        }
        tokens = dict(zip(self.req_ids, self.tokens.tolist(), strict=True))
        total = self.budget.get_num_tokens(tokens, drafts)
        logits = np.zeros(len(self.drafts) + 1, dtype=np.int32)
        np.cumsum(self.drafts + 1, out=logits[1:])
        rows, cu_logits = self.budget.compact_batch(
            self.drafts.copy(), self.tokens.copy(), logits
        )
        host = rows.tolist(), np.diff(cu_logits).tolist()
        answer = self.budget.reallocate_drafts(self.req_ids, self.slots)
        starts, query_starts, num_drafts = answer[:3]
        assert query_starts is self.starts
        assert query_starts.dtype == starts.dtype == torch.int32
        count = len(self.drafts)
        assert starts.shape == (count + 1,)
        assert int(starts[0]) == int(query_starts[0]) == 0
        assert int(starts[-1]) == count + num_drafts == int(cu_logits[-1])
        assert set(query_starts[count:].tolist()) == {total}
        if not num_drafts:
            assert cu_logits.tolist() == starts.tolist()
        device = query_starts[: count + 1].diff().tolist(), starts.diff().tolist()
        assert sum(host[0]) == sum(device[0]) == total
        assert total == int((self.tokens - self.drafts).sum()) + num_drafts
        # A row of logits for each node and the root, among the last rows.
        for rows_of, logits_of in (host, device):
            own = [rows - n for rows, n in zip(rows_of, logits_of, strict=True)]
            assert own == [n - 1 for _, n, _ in self.requests]
        return total, host, device


@pytest.mark.parametrize("rung", SHARED)
def test_every_request_of_a_batch_brings_as_many(rung: Rung) -> None:
    step = Step([(rung.num_drafts, 1, False)] * 7)
    total, (rows, _), (kept_rows, _) = step.run()
    assert total == 7 * (rung.num_nodes + 1)
    assert rows == [rung.num_nodes + 1] * 7
    assert kept_rows != rows
    assert max(kept_rows) <= rung.num_drafts + 1


def test_unequal_numbers_of_drafts() -> None:
    """Cut at the context's end, or drafted in an earlier step of another size."""
    requests = [(6, 1, False), (2, 1, False), (6, 1, False), (1, 1, False)]
    total, (rows, _), (kept, _) = Step(requests).run()
    assert total == 4 + 4 * 3
    assert rows == [6, 3, 5, 2]
    assert all(
        n <= drafts + 1 for n, (drafts, _, _) in zip(kept, requests, strict=True)
    )
    # Fewer drafts than the budget: all are kept.
    assert Step([(6, 1, False), (1, 1, False), (0, 1, False)]).run()[0] == 3 + 6
    few = [(6, 1, False), (1, 1, False), (1, 1, False), (1, 1, False)]
    assert Step(few).run()[2][0] == [7, 2, 2, 2]


def test_requests_without_drafts_and_prompts_beside_them() -> None:
    requests = [(4, 1, False), (4, 1, False), (0, 1, False), (0, 33, True)]
    total, host, device = Step(requests).run()
    assert total == 2 + 4 + 1 + 33
    assert host[0][2:] == device[0][2:] == [1, 33]
    assert host[1][2:] == device[1][2:] == [1, 1]


def test_nothing_is_verified_beside_placeholders_of_a_prompt() -> None:
    """Where they are in the batch, the host does not know when it shares the rows."""
    requests = [(4, 1, False), (4, 1, True), (4, 1, False), (0, 5, True)]
    total, host, device = Step(requests).run()
    assert total == 3 + 5
    assert host == device == ([1, 1, 1, 5], [1, 1, 1, 1])


@pytest.mark.parametrize("max_logits", [0, 3, 4, 5, 9, 11, 12, 13, 99])
def test_the_sampler_takes_the_rows_at_once(max_logits: int) -> None:
    step = Step([(6, 1, False)] * 3 + [(0, 1, False)], max_logits)
    total, _, (_, logits) = step.run()
    assert total == 4 + min(9, max(max_logits - 4, 0))
    assert sum(logits) <= max(max_logits, 4)


def test_no_step_sees_the_one_before() -> None:
    step = Step([(6, 1, False)] * 3)
    step.run()
    other = Step([(4, 1, False)] * 2 + [(0, 5, True)])
    step.requests, step.drafts, step.tokens = other.requests, other.drafts, other.tokens
    assert step.run()[0] == 2 + 4 + 5


def test_both_forms_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([(6, 1, False)] * 3)
    drafts = {req_id: [-1] * 6 for req_id in step.req_ids}
    step.budget.get_num_tokens(dict.fromkeys(step.req_ids, 7), drafts)
    name = "AdmittedDraftCounts"
    monkeypatch.delattr(adaptive_verification, name, raising=False)
    answer = step.budget.reallocate_drafts(step.req_ids, step.slots)
    assert len(answer) == 3
    monkeypatch.setattr(adaptive_verification, name, object, raising=False)
    *same, counts = step.budget.reallocate_drafts(step.req_ids, step.slots)
    assert counts is None
    assert [getattr(x, "tolist", lambda x=x: x)() for x in same] == [
        getattr(x, "tolist", lambda x=x: x)() for x in answer
    ]


def serves(budget: NodeBudget, *widths: int, grammar: bool = False) -> bool:
    return budget.serves(
        SimpleNamespace(
            scheduled_spec_decode_tokens={
                f"r{i}": [-1] * n for i, n in enumerate(widths)
            },
            has_structured_output_requests=grammar,
        )
    )


def test_which_steps_share() -> None:
    budget = Step([(6, 1, False)]).budget
    assert budget.widest == max(rung.num_drafts for rung in SHARED)
    assert not serves(budget)
    for rung in LADDER:
        assert serves(budget, rung.num_drafts, 1) == rung.is_shared
        assert not serves(budget, rung.num_drafts, grammar=True)
    assert not serves(budget, SHARED[0].num_drafts, 15)


def test_nothing_is_shared_unasked_or_beside_adapters() -> None:
    """vLLM repeats a request's adapter by the rows that the host scheduled for it."""
    shape = TreeShape(6, 3, NODES, 2)
    ladder = build_ladder(shape, may_share=True)
    equal = tuple(rung for rung in ladder if not rung.is_shared)
    assert len(equal) < len(ladder)
    shares = MTPConfig(shape, auto=True, share_nodes=True)
    unasked = replace(shares, share_nodes=False)
    assert ladder_of(SimpleNamespace(lora_config=None), shares) == ladder
    assert ladder_of(SimpleNamespace(lora_config=object()), shares) == equal
    assert ladder_of(SimpleNamespace(lora_config=None), unasked) == equal
