"""``"shape": "auto"``: any sequence of tree sizes gives the same tokens."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.e2e.test_ids import LENGTHS, sampling
from tests.e2e.test_metrics import read_counts
from tests.helpers.engine import counters, engine, generate, runner_of
from tests.helpers.prompts import held_out
from vllm_mtp.auto.ladder import Rung

AUTO = {"method": "mtp_tree", "shape": "auto", "share_nodes": True}
COUNT, TOKENS = 8, 64


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    with engine() as llm:
        return generate(
            llm, held_out(COUNT, LENGTHS), sampling(COUNT, (0.0, 0.8), TOKENS)
        )


@pytest.fixture(scope="module")
def auto(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        with engine(AUTO) as llm:
            yield llm


def test_policy_runs_and_ids_are_equal(auto: Any, reference: Any) -> None:
    params = sampling(COUNT, (0.0, 0.8), TOKENS)
    assert generate(auto, held_out(COUNT, LENGTHS), params) == reference
    policy = scheduler_of(auto).shape_policy
    assert policy.steps > 10
    assert policy.acceptance.trees > 16
    assert policy.acceptance.predict(policy.current) > 1.3
    assert sum(policy.costs.weights) > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_ids_are_equal_whatever_the_policy_does(
    auto: Any, reference: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another size every step, none at all among them."""
    policy = scheduler_of(auto).shape_policy
    rng, used = random.Random(seed), set()

    def choose(batch: int, context: int) -> int:
        used.add(rung := rng.randrange(len(policy.ladder)))
        return rung

    monkeypatch.setattr(policy, "choose", choose)
    before, counted = counters(auto), read_counts(auto)
    params = sampling(COUNT, (0.0, 0.8), TOKENS)
    assert generate(auto, held_out(COUNT, LENGTHS), params) == reference
    assert len(used) == len(policy.ladder)
    after = counters(auto)
    assert after["num_accepted_tokens"] > before["num_accepted_tokens"] + COUNT
    check_counts(read_counts(auto) - counted, {r.num_nodes for r in policy.ladder})


def check_counts(counts: Counter[str], sizes: set[int]) -> None:
    """Metrics of a run in which every size was used, and every request had a tree."""
    drafts = counts["spec_decode_num_drafts"]
    without = {k.split("/")[1]: n for k, n in counts.items() if "without" in k}
    assert without["prefill"] == COUNT
    assert without["policy"] > 0
    # The last pass of a request may emit more than it was asked for.
    emitted = drafts + counts["spec_decode_num_accepted_tokens"] + sum(without.values())
    assert COUNT * TOKENS <= emitted <= COUNT * (TOKENS + 5)
    # Where nodes are shared, more are drafted for each request than it verifies.
    verified = counts["mtp_tree_nodes_verified"]
    assert 0.5 < verified / counts["spec_decode_num_draft_tokens"] < 1
    widths = {int(k.split("/")[1]): n for k, n in counts.items() if "passes" in k}
    assert widths.keys() == sizes
    least, most = (sum(w * n for w, n in widths.items()) * k for k in (1, COUNT))
    assert least <= verified <= most
    assert counts["mtp_tree_nodes_drafted"] > verified


def drafts_of(llm: Any, prompt: list[int], choose: Any) -> dict[int, tuple[int, ...]]:
    """Drafted tokens by the position of the root, while ``choose`` is the policy."""
    found: dict[int, tuple[int, ...]] = {}

    def observe(batch: Any, fed: Any, _drawn: Any, _emitted: Any) -> None:
        if len(fed) > 1:
            root = int(batch.positions[batch.logits_indices[0]])
            found[root] = tuple(fed.tolist()[1:])

    runner, policy = runner_of(llm), scheduler_of(llm).shape_policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "choose", choose)
        patch.setattr(runner.rejection_sampler, "observer", observe)
        generate(llm, [prompt], sampling(1, (0.0,), 48))
    return found


def test_drafts_after_a_pause_are_those_without_one(auto: Any) -> None:
    """While nothing is drafted the draft's KV stays complete, and no head runs."""
    prompt, steps, heads = held_out(1, (20,))[0], [0], [0]
    speculator = runner_of(auto).speculator
    compute = speculator.compute_draft_logits

    def compute_draft_logits(hidden: Any, step: int) -> Any:
        heads[0] += steps[0] < 20
        return compute(hidden, step)

    def pause(batch: int, context: int) -> int:
        steps[0] += 1
        return 0 if steps[0] < 20 else 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "compute_draft_logits", compute_draft_logits)
        paused = drafts_of(auto, prompt, pause)
    assert heads[0] == 0
    steady = drafts_of(auto, prompt, lambda batch, context: 3)
    common = paused.keys() & steady.keys()
    assert len(common) >= 3
    assert {root: paused[root] for root in common} == {
        root: steady[root] for root in common
    }


@pytest.mark.parametrize("narrow", [Rung(2, 2), Rung(7, 6)])
def test_drafts_after_a_wider_tree_are_those_without_one(
    auto: Any, narrow: Rung
) -> None:
    """Catches: candidates of the largest tree that are left where a smaller one has
    none. Its steps are every second one here; ids are right either way."""
    ladder, prompt, steps = scheduler_of(auto).shape_policy.ladder, held_out(1)[0], [0]
    rung = ladder.index(narrow)

    def in_turn(batch: int, context: int) -> int:
        steps[0] += 1
        return rung if steps[0] % 2 else len(ladder) - 1

    mixed = {
        root: tokens
        for root, tokens in drafts_of(auto, prompt, in_turn).items()
        if len(tokens) == narrow.num_nodes
    }
    steady = drafts_of(auto, prompt, lambda batch, context: rung)
    common = mixed.keys() & steady.keys()
    assert len(common) >= 3
    assert {root: mixed[root] for root in common} == {
        root: steady[root] for root in common
    }


def test_nothing_is_drafted_beyond_the_context_limit(
    auto: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked every few steps, so it is off and on again within one request."""
    scheduler = scheduler_of(auto)
    prompt, contexts = held_out(1, (20,))[0], []

    def limit(tokens: int | None) -> dict[int, tuple[int, ...]]:
        monkeypatch.setattr(scheduler, "max_context", tokens)

        def choose(batch: int, context: int) -> int:
            contexts.append(context)
            return 3

        return drafts_of(auto, prompt, choose)

    whole = limit(None)
    assert max(contexts) > 40
    contexts.clear()
    short = limit(40)
    assert max(contexts) <= 40
    assert 0 < len(short) < len(whole)


def test_measured_steps_have_real_rows(
    auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tokens would all go to the same experts, padding to none."""
    runner = runner_of(auto)
    speculator, seen = runner.speculator, []
    propose = speculator.propose

    def watch(*, input_batch: Any, **kwargs: Any) -> Any:
        tokens, padding = input_batch.input_ids, input_batch.is_padding
        seen.append((tokens.tolist(), padding.any().item()))
        return propose(input_batch=input_batch, **kwargs)

    monkeypatch.setattr(speculator, "propose", watch)
    runner._run_dummy_step(Rung(3, 3), 2, 16)
    ((tokens, padded),) = seen
    assert len(tokens) == 8
    assert len(set(tokens)) > 4
    assert not padded
    assert not runner.is_measuring
    assert speculator.dummy_nodes is None


def test_graphs_of_one_row_are_captured_without_the_head(
    auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator, skipped = runner_of(auto).speculator, []
    upstream = type(speculator).__mro__[1]
    monkeypatch.setattr(
        upstream, "_prefill", lambda self, *_, **__: skipped.append(self.skips_head)
    )
    speculator._prefill(2, 2)
    monkeypatch.setattr(speculator, "is_capturing", True)
    for rows in (2, 8):
        speculator._prefill(2, rows)
    assert skipped == [False, True, False]
    assert not speculator.skips_head


def test_drafts_are_ranked_flatter_than_the_request_asks(auto: Any) -> None:
    generate(auto, held_out(1, (20,)), sampling(1, (0.8,), 4))
    temperatures = runner_of(auto).speculator.temperature.tolist()
    assert max(temperatures) == pytest.approx(1.1 * 0.8)
