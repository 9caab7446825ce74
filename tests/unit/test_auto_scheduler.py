"""What the scheduler of ``"shape": "auto"`` tells the policy about steps."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.auto.acceptance import AcceptanceModel
from vllm_mtp.auto.costs import CostModel, default_table
from vllm_mtp.auto.ladder import build_ladder, shared_nodes
from vllm_mtp.auto.policy import Policy
from vllm_mtp.auto.scheduler import AutoShapeMixin
from vllm_mtp.config import TreeShape

LADDER = build_ladder(TreeShape(6, 3, 12, 2), may_share=True)
WIDTHS = [rung.num_drafts for rung in LADDER]


@pytest.fixture
def scheduler() -> Any:
    """One without vLLM's part."""
    made: Any = object.__new__(AutoShapeMixin)
    made.rung_of = {rung.num_drafts: index for index, rung in enumerate(LADDER)}
    made._shared = shared_nodes(LADDER)
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=True)
    made.shape_policy = Policy(LADDER, AcceptanceModel(LADDER, 3), costs)
    made._context, made._last_update = 1024, 0.0
    made._last_step = made._pending = None
    made.max_context, made._lookups, made._logged = None, 0, (0.0, -1)
    return made


def step(
    scheduler: Any, width: int, *, is_new: bool = False, has_grammar: bool = False
) -> None:
    """One step of one request that brings ``width`` drafts and gets as many."""
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"r": width + 1},
        total_num_scheduled_tokens=width + 1,
        scheduled_spec_decode_tokens={"r": [-1] * width} if width else {},
        scheduled_new_reqs=["r"] if is_new else [],
        num_spec_tokens_to_schedule=width,
        has_structured_output_requests=has_grammar,
    )
    output = SimpleNamespace(sampled_token_ids=[[1]], req_id_to_index={"r": 0})
    scheduler._observe(scheduled, output)


@pytest.mark.parametrize(
    ("running", "scheduled", "nodes"), [(4, 4, 12), (8, 4, 7), (40, 4, 0), (4, 64, 0)]
)
def test_every_running_request_fits_into_a_pass(
    scheduler: Any,
    monkeypatch: pytest.MonkeyPatch,
    running: int,
    scheduled: int,
    nodes: int,
) -> None:
    """Catches: trees so large that the last requests are never scheduled."""
    monkeypatch.setattr(
        scheduler.shape_policy, "choose", lambda batch, context: len(LADDER) - 1
    )
    scheduler.running = [
        SimpleNamespace(num_computed_tokens=9, use_structured_output=False)
    ] * running
    scheduler.max_num_scheduled_tokens = 64
    assert scheduler[scheduled] == nodes


@pytest.mark.parametrize("width", [0, 7])
def test_steady_steps_are_timed(scheduler: Any, width: int) -> None:
    """Of several alike all but the first; each once the next only decodes too."""
    costs, timed = scheduler.shape_policy.costs, 0
    for other in (3, 4):
        for told in (0, 0, 1, 1):
            step(scheduler, width)
            timed += told
            assert costs.weights[WIDTHS.index(width)] == pytest.approx(timed, abs=0.1)
        step(scheduler, other)
        timed += 1
        assert sum(costs.weights) == pytest.approx(timed, abs=0.1)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_step_that_waited_for_the_launch_of_a_prefill_is_not_timed(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Its output is read after that. Catches: a size that looks dear because requests
    arrived while it was used; twice the time, in a batch of one on an H200."""
    costs, now = scheduler.shape_policy.costs, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    usual = costs.predict(WIDTHS.index(7), 1, 1024) / 1e3
    for seconds in (usual, usual, usual, usual, 10 * usual):
        now[0] += seconds
        step(scheduler, 7)
    now[0] += usual
    step(scheduler, 0 if is_new else 7, is_new=is_new)
    dearer = costs.predict(WIDTHS.index(7), 1, 1024) / 1e3 > 1.02 * usual
    assert dearer != is_new


def test_without_overlap_a_step_is_timed_at_once(scheduler: Any) -> None:
    scheduler.overlaps = False
    costs = scheduler.shape_policy.costs
    for timed in (0, 1, 2):
        step(scheduler, 7)
        assert costs.weights[WIDTHS.index(7)] == pytest.approx(timed, abs=0.1)
    step(scheduler, 0, is_new=True)
    assert sum(costs.weights) == pytest.approx(2, abs=0.1)


def test_idle_time_before_a_prompt_of_one_token_is_no_step(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a prompt looks like a step without drafts, as does one that is cached."""
    costs, now = scheduler.shape_policy.costs, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for seconds in (0.0, 0.02, 0.02):
        now[0] += seconds
        step(scheduler, 0)
    before = costs.predict(0, 1, 1024)
    now[0] += 3600
    for _ in range(2):
        step(scheduler, 0, is_new=True)
    assert costs.predict(0, 1, 1024) == before


@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_grammar_in_the_batch_tells_nothing_about_sharing(
    scheduler: Any, has_grammar: bool
) -> None:
    """Such a step verifies all drafts of every request; equal rungs are the same."""
    policy = scheduler.shape_policy
    for rung, index in ((r, i) for i, r in enumerate(LADDER) if r.num_nodes):
        trees, weight = policy.acceptance.trees, policy.costs.weights[index]
        for _ in range(3):
            step(scheduler, rung.num_drafts, has_grammar=has_grammar)
        told = not (rung.is_shared and has_grammar)
        assert (policy.acceptance.trees > trees) == told, rung
        assert (policy.costs.weights[index] > weight) == told, rung


@pytest.mark.parametrize(("grammars", "may"), [((), True), ((1,), False)])
def test_nothing_is_shared_beside_a_grammar(
    scheduler: Any, grammars: tuple[int, ...], may: bool
) -> None:
    """Its rows are filled in on the host."""
    scheduler.running = [
        SimpleNamespace(num_computed_tokens=9, use_structured_output=i in grammars)
        for i in range(3)
    ]
    scheduler.max_num_scheduled_tokens = 64
    assert scheduler[3] >= 0
    assert scheduler.shape_policy.may_share is may
