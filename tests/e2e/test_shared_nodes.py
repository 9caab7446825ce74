"""Batches that share their nodes: each request keeps what its drafts are worth.

The policy shares only where step costs were measured and the batch is large, so every
test here says which rung is used. The reference runs first, then one engine serves all.
"""

import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_metrics import read_counts
from tests.e2e.test_processors import NoReturn
from tests.e2e.test_structured import ANYTHING
from tests.helpers.engine import engine, runner_of
from tests.helpers.prompts import held_out
from tests.helpers.scheduling import (
    MAX_MODEL_LEN,
    SETTINGS,
    Scheduled,
    scheduled_engine,
)
from vllm_mtp.auto import sharing
from vllm_mtp.trace.load import load_trace
from vllm_mtp.trace.schema import Step

TOKENS = 14

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "bad_words": ["self", "self.assert", "return"]},
    {"temperature": 0.8, "logit_bias": {53: 3.0, 199: -100.0}, "logprobs": 0},
    {"temperature": 0.9, "min_p": 0.1, "top_k": 20, "n": 2},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
]

Requests = dict[str, tuple[list[int], dict[str, Any]]]


def build(settings: list[dict[str, Any]], lengths: tuple[int, ...]) -> Requests:
    """One request for each settings; all are seeded."""
    prompts, long = held_out(48), 3 * max(held_out(48), key=len)
    return {
        f"r{i}": (
            (prompts[i] + long)[: lengths[i % len(lengths)]],
            {"max_tokens": TOKENS, "seed": 40 + i, "ignore_eos": True, **own},
        )
        for i, own in enumerate(settings)
    }


def sampled(count: int, **own: Any) -> list[dict[str, Any]]:
    return [{"temperature": (0.0, 0.8)[i % 2], **own} for i in range(count)]


GRAMMAR = {"temperature": 0.0, "grammar": ANYTHING, "ignore_eos": False}
CHAIN = {"temperature": 0.8, "extra_args": {"no_return": True}}

SCENARIOS: dict[str, Requests] = {
    "parameters": build(MIXED, (20, 1, 9, 33)),
    "arrivals": build(MIXED[::-1], (20, 65, 9, 120, 2, 33)),
    "ends": build(
        [{"temperature": 0.0, "max_tokens": n} for n in (1, 2, 3, 5)]
        + sampled(4, max_tokens=64),
        (20, 33, 9, 17, *(MAX_MODEL_LEN - n for n in (20, 18, 11, 9))),
    ),
    "chains": build([*sampled(4), CHAIN, CHAIN], (20, 9, 33)),
    "grammars": build([*sampled(4), GRAMMAR], (20, 9, 33)),
    "preemption": build(sampled(8, max_tokens=20), (33, 20, 40, 9)),
    "prefixes": build(sampled(3), (70,))
    | {
        f"again{i}": request
        for i, request in enumerate(build(sampled(3), (70,)).values())
    },
    "aborts": build(sampled(8), (20, 33, 9)),
}


def make_params(settings: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    settings = {**settings, "output_kind": RequestOutputKind.FINAL_ONLY}
    if regex := settings.pop("grammar", None):
        settings["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return SamplingParams(**settings)


def values_of(logprobs: Any) -> list[dict[int, float]] | None:
    if logprobs is None:
        return None
    return [{k: v.logprob for k, v in (entry or {}).items()} for entry in logprobs]


def found_in(output: Any) -> tuple[Any, ...]:
    """Ids of each completion, log-probabilities of each, the prompt's."""
    ids = [list(completion.token_ids) for completion in output.outputs]
    scores = [values_of(completion.logprobs) for completion in output.outputs]
    return ids, [*scores, values_of(output.prompt_logprobs)]


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, tuple[Any, ...]]]:
    """Scenario -> request -> what no speculation gives."""
    found = {}
    with engine(**SETTINGS, logits_processors=[NoReturn]) as llm:
        for scenario, requests in SCENARIOS.items():
            inputs = [{"prompt_token_ids": prompt} for prompt, _ in requests.values()]
            params = [make_params(settings) for _, settings in requests.values()]
            outputs = llm.generate(inputs, params, use_tqdm=False)
            found[scenario] = dict(zip(requests, map(found_in, outputs), strict=True))
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "t.jsonl"


@contextlib.contextmanager
def cache_root(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        yield


@pytest.fixture(scope="module")
def shared(reference: Any, trace: Path) -> Iterator[Scheduled]:
    settings = {"path": str(trace), "max_requests": 64, "text": False}
    with (
        cache_root(trace.parent),
        scheduled_engine(
            {
                "method": "mtp_tree",
                "shape": "auto",
                "share_nodes": True,
                "trace": settings,
            },
            logits_processors=[NoReturn],
        ) as s,
    ):
        yield s


@dataclass
class Watch:
    """What was asked of ``keep_best`` and of the policy, and the answers."""

    kept: list[tuple[list[int], list[int], int]] = field(default_factory=list)
    """(limits, nodes kept, budget) of every step that shared."""

    nodes: dict[str, list[int]] = field(default_factory=dict)
    """Nodes kept by a request in each step that it had drafts in."""

    served: Counter[bool] = field(default_factory=Counter)
    """Whether steps with drafts shared their nodes."""

    def check(self) -> None:
        """Every step spent its budget, and some gave requests unequal numbers."""
        for limits, kept, budget in self.kept:
            assert sum(kept) == budget
            assert all(0 <= k <= most for k, most in zip(kept, limits, strict=True))
        assert any(self.is_unequal(*step) for step in self.kept)

    @staticmethod
    def is_unequal(limits: list[int], kept: list[int], budget: int) -> bool:
        """More apart than equal shares of requests with as many drafts would be."""
        full = [k for k, most in zip(kept, limits, strict=True) if most == max(limits)]
        return max(full) - min(full) > 1


@pytest.fixture
def watch(shared: Scheduled, monkeypatch: pytest.MonkeyPatch) -> Watch:
    found, keep_best = Watch(), sharing.keep_best
    budget = runner_of(shared.llm).budget
    serves, reallocate = budget.serves, budget.reallocate_drafts

    def kept(
        scores: Any, idx: Any, limits: torch.Tensor, budget: int, widest: int
    ) -> Any:
        answer = keep_best(scores, idx, limits, budget, widest)
        found.kept.append((limits.tolist(), answer.tolist(), budget))
        return answer

    def served(scheduler_output: Any) -> bool:
        answer: bool = serves(scheduler_output)
        if scheduler_output.scheduled_spec_decode_tokens:
            found.served[answer] += 1
        return answer

    def reallocated(req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        answer = reallocate(req_ids, idx_mapping)
        for req_id, rows in zip(req_ids, answer[0].diff().tolist(), strict=True):
            if budget.limits.get(req_id):
                found.nodes.setdefault(req_id.rsplit("-", 1)[0], []).append(rows - 1)
        return answer

    monkeypatch.setattr(sharing, "keep_best", kept)
    monkeypatch.setattr(budget, "reallocate_drafts", reallocated)
    monkeypatch.setattr(budget, "serves", served)
    return found


Choose = Callable[[int, int], int]


def rungs(s: Scheduled) -> list[int]:
    """Indexes of the rungs whose batch shares."""
    ladder = s.scheduler.shape_policy.ladder
    return [i for i, rung in enumerate(ladder) if rung.is_shared]


def always(rung: int) -> Choose:
    return lambda batch, context: rung


def at_random(s: Scheduled, seed: int) -> Choose:
    """Every second rung, about, is one whose batch shares."""
    rng, every = random.Random(seed), range(len(s.scheduler.shape_policy.ladder))
    return lambda batch, context: rng.choice(rng.choice((every, rungs(s))))


def serve(
    s: Scheduled,
    reference: Any,
    scenario: str,
    choose: Choose,
    arrivals: dict[str, int] | None = None,
    aborts: dict[str, int] | None = None,
    num_blocks: int | None = None,
) -> None:
    """Serve a scenario; what finishes is what no speculation gives."""
    requests = {
        name: (prompt, make_params(settings))
        for name, (prompt, settings) in SCENARIOS[scenario].items()
    }
    s.forget_prefixes()
    before = s.accepted()
    pool = s.free_blocks(num_blocks or s.free_at_start)
    with pytest.MonkeyPatch.context() as patch, pool:
        patch.setattr(s.scheduler.shape_policy, "choose", choose)
        finished = s.drive(requests, arrivals, aborts)
    s.assert_nothing_leaked()
    assert finished.keys() == requests.keys() - (aborts or {}).keys()
    assert s.accepted() > before
    for name in finished:
        check_output(name, found_in(s.outputs[name]), reference[scenario][name])


def check_output(name: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert ours[0] == theirs[0], name
    for ids, scores in zip(ours[0], ours[1], strict=False):
        assert scores is None or len(scores) == len(ids), name
    for found, expected in zip(ours[1], theirs[1], strict=True):
        assert (found is None) == (expected is None), name
        for i, (a, b) in enumerate(zip(found or (), expected or (), strict=True)):
            assert len(a) == len(b), (name, i)
            # The last ranks may swap where two tokens are equally likely.
            for token in a.keys() & b.keys():
                assert math.isclose(a[token], b[token], abs_tol=1e-4), (name, i)
            assert len(a.keys() & b.keys()) >= len(a) - 1, (name, i)


def test_shared_rungs_in_turn(
    shared: Scheduled, reference: Any, watch: Watch, trace: Path
) -> None:
    """Every sampling parameter; the trace has the rows that each request kept."""
    rng, ours = random.Random(0), rungs(shared)
    before = len(load_trace(trace).steps)
    counted = read_counts(shared.llm)
    serve(shared, reference, "parameters", lambda *_: rng.choice(ours))
    watch.check()
    assert not watch.served[False]
    ladder = shared.scheduler.shape_policy.ladder
    nodes = {ladder[rung].num_nodes for rung in ours}
    assert widths(read_counts(shared.llm) - counted) == nodes
    steps = read_trace(trace, runner_of(shared.llm).collector.step)[before:]
    for name, (prompt, settings) in SCENARIOS["parameters"].items():
        if "n" in settings:
            continue
        own = [step for step in steps if step.request.rsplit("-", 1)[0] == name]
        drafted = [step for step in own if step.position >= len(prompt)]
        assert [len(step.tokens) - 1 for step in drafted] == watch.nodes[name]
        (ids,) = reference["parameters"][name][0]
        for step in drafted:
            first = step.position - len(prompt)
            if first >= len(ids):
                continue  # In flight when the request ended.
            assert step.tokens[0] == ids[first]
            emitted = ids[first + 1 : first + 1 + len(step.path)]
            assert list(step.emitted[: len(emitted)]) == emitted
            scores = [score for score in step.scores if score is not None]
            assert scores == sorted(scores, reverse=True)
            assert all(p < row for row, p in enumerate(step.parents))


def widths(counts: Counter[str]) -> set[int]:
    """Nodes of the widest tree of the passes counted, on average where shared."""
    return {int(name.split("/")[1]) for name in counts if "passes/" in name}


def read_trace(path: Path, last: int) -> list[Step]:
    """The steps, once the pass numbered ``last`` is written."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        steps = list(load_trace(path).steps)
        if steps and steps[-1].step == last:
            return steps
        time.sleep(0.05)
    raise AssertionError(f"pass {last} is not in the trace")


def test_shared_and_equal_rungs_in_turn(
    shared: Scheduled, reference: Any, watch: Watch
) -> None:
    serve(shared, reference, "parameters", at_random(shared, 1))
    watch.check()
    assert watch.served[True] > 2 < watch.served[False]


@pytest.mark.parametrize("budget", [24, pytest.param(2048, marks=pytest.mark.slow)])
def test_prompts_are_read_beside_shared_steps(
    shared: Scheduled, reference: Any, watch: Watch, budget: int
) -> None:
    """In chunks, or whole; with scores of the prompt's tokens, too."""
    arrivals = {f"r{i}": 3 * (i % 4) for i in range(8)}
    shared.chunks.clear()
    with shared.budget(budget):
        rung = rungs(shared)[budget > 24]
        serve(shared, reference, "arrivals", always(rung), arrivals)
    assert max(shared.chunks) <= min(budget, 120)
    assert watch.served[True] > 5
    watch.check()


def test_ends_of_requests(shared: Scheduled, reference: Any, watch: Watch) -> None:
    """By ``max_tokens``, and at each place of a tree by ``max_model_len``."""
    serve(shared, reference, "ends", always(rungs(shared)[-1]))
    assert any(len({*limits} - {0}) > 1 for limits, _, _ in watch.kept)


def test_chains_share_with_trees(
    shared: Scheduled, reference: Any, watch: Watch
) -> None:
    """Their best nodes are one below the other; padding is what goes first."""
    serve(shared, reference, "chains", always(rungs(shared)[1]))
    watch.check()
    assert not watch.served[False]


def test_a_grammar_in_the_batch_makes_it_equal(
    shared: Scheduled, reference: Any, watch: Watch
) -> None:
    counted = read_counts(shared.llm)
    serve(shared, reference, "grammars", always(rungs(shared)[1]), {"r4": 4})
    assert watch.served[True] > 2 < watch.served[False]
    rung = shared.scheduler.shape_policy.ladder[rungs(shared)[1]]
    found = widths(read_counts(shared.llm) - counted)
    assert {rung.num_nodes, rung.num_drafts} <= found


def test_preempted_requests(shared: Scheduled, reference: Any, watch: Watch) -> None:
    before = shared.preemptions
    choose = at_random(shared, 2)
    serve(shared, reference, "preemption", choose, num_blocks=8)
    assert shared.preemptions > before
    assert watch.served[True] > 5


def test_prefix_hits(shared: Scheduled, reference: Any, watch: Watch) -> None:
    arrivals = {f"again{i}": 9 for i in range(3)}
    serve(shared, reference, "prefixes", always(rungs(shared)[1]), arrivals)
    assert [shared.cached[name] for name in arrivals] == [48] * 3
    watch.check()


def test_aborts(shared: Scheduled, reference: Any, watch: Watch) -> None:
    """While the sampler takes few rows at once, or none beyond the roots."""
    budget = runner_of(shared.llm).budget
    rung, rng = rungs(shared)[2], random.Random(3)

    def choose(batch: int, context: int) -> int:
        patch.setattr(budget, "max_logits", batch + rng.choice((0, 1, 7, 99)))
        return rung

    with pytest.MonkeyPatch.context() as patch:
        aborts = {"r0": 1, "r2": 2, "r5": 4, "r6": 5}
        serve(shared, reference, "aborts", choose, aborts=aborts)
    watch.check()
    budgets = {budget for _, _, budget in watch.kept}
    assert {0, 1, 7} < budgets
