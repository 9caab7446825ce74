"""The models behind ``"shape": "auto"``: ladder, acceptance, costs and their file."""

import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_mtp.auto import profile
from vllm_mtp.auto.acceptance import AcceptanceModel, expected_nodes, tree_nodes
from vllm_mtp.auto.costs import (
    CostCacheError,
    CostModel,
    CostTable,
    default_table,
    interpolate,
)
from vllm_mtp.auto.ladder import (
    OFF,
    Rung,
    build_ladder,
    graph_batches,
    graph_sizes,
    rung_of,
    shared_graphs,
)
from vllm_mtp.auto.profile import NEW_WORDS, fill_table, measure, repeat_some
from vllm_mtp.config import (
    AUTO_SIZES,
    SettingsError,
    TreeShape,
    candidates,
    parse_settings,
)

LARGEST = TreeShape(6, 3, 12, 2)
LADDER = build_ladder(LARGEST, may_share=True)


def equal_of(nodes: int) -> int:
    """Index of the equal rung of so many nodes, or of the next larger one."""
    return next(
        index
        for index, rung in enumerate(LADDER)
        if rung.num_nodes >= nodes and not rung.is_shared
    )


def test_ladder_ends_with_the_largest_tree() -> None:
    assert LADDER[0] == OFF
    assert LADDER[-1] == Rung(12, 6, frontier=2) == rung_of(LARGEST)
    nodes = [rung.num_nodes for rung in LADDER]
    assert nodes == sorted(nodes)
    equal = [rung.num_nodes for rung in LADDER if not rung.is_shared]
    assert equal == sorted(set(equal))


@pytest.mark.parametrize("nodes", range(2, 25))
def test_drafts_name_a_rung(nodes: int) -> None:
    """Catches: a size of one's own that shares its number with a shared rung."""
    ladder = build_ladder(TreeShape(6, 4, nodes), may_share=True)
    drafts = [rung.num_drafts for rung in ladder]
    assert len(set(drafts)) == len(drafts)
    assert max(drafts) == nodes
    for rung in ladder:
        assert rung.num_drafts >= rung.num_nodes


def test_batches_that_share_have_graphs() -> None:
    sizes = shared_graphs(LADDER, 200)
    assert {tokens // reqs for reqs, tokens in sizes} == {3, 4, 6}
    assert {reqs for reqs, _ in sizes} == {32, 64, 96, 128, 192, 200}
    assert all(tokens <= 2048 for _, tokens in shared_graphs(LADDER, 1024))
    assert shared_graphs(LADDER, 16) == []


def test_sharing_accepts_more_of_certain_text() -> None:
    shared, equal = Rung(3, 6, 6), Rung(3, 6)
    gains = [
        expected_nodes(shared, 3, p) / expected_nodes(equal, 3, p)
        for p in (0.3, 0.43, 0.6, 0.77, 0.9)
    ]
    assert gains == pytest.approx([1, 1, 1.105, 1.21, 1.21], abs=0.001)


@pytest.mark.parametrize(
    "largest",
    [
        TreeShape(1, 2, 2),
        TreeShape(2, 2, 6),
        TreeShape(2, 2, 4, 1),
        TreeShape(2, 3, 8, 2),
        TreeShape(3, 4, 7),
        TreeShape(16, 2, 20),
        TreeShape(6, 3, 12, 1),
        TreeShape(6, 2, 12, 1),
        TreeShape(6, 3, 12, 2),
        TreeShape(6, 2, 10, 2),
    ],
)
def test_every_rung_has_enough_candidates(largest: TreeShape) -> None:
    """Catches: a size counted with more expanded nodes than it has."""
    ladder = build_ladder(largest, may_share=True)
    assert len(ladder) > 1
    for rung in ladder[1:]:
        found = candidates(rung.num_steps, largest.topk, rung.frontier)
        assert rung.num_nodes <= rung.num_drafts <= found
        assert rung.num_steps <= largest.num_steps
        assert 1 <= rung.frontier <= largest.frontier
        # The scratch rows of the largest hold those of all.
        assert (rung.num_steps - 1) * rung.frontier <= largest.num_scratch_rows
    assert ladder[-1] == rung_of(largest)
    assert ladder[-1].levels == (largest.num_steps, largest.frontier)


def test_sizes_of_auto_expand_one_node_or_two() -> None:
    assert {rung.frontier for rung in LADDER} == {1, 2}
    narrow = build_ladder(TreeShape(6, 3, 12, 1), may_share=True)
    assert {rung.frontier for rung in narrow} == {1}
    wide = build_ladder(TreeShape(6, 3, 12, 3), may_share=True)
    assert wide[:-1] == LADDER[:-1]
    assert wide[-1].levels == (6, 3)


def test_graphs_cover_every_rung_and_the_largest_batch() -> None:
    assert graph_batches(20)[-1] == 20
    sizes = graph_sizes(LADDER, 20)
    assert all(20 * (rung.num_nodes + 1) in sizes for rung in LADDER)
    assert max(graph_sizes(LADDER, 1024)) <= 2048


def test_settings() -> None:
    parsed = parse_settings({"method": "mtp_tree", "shape": "auto"})
    assert parsed.config.auto
    assert parsed.config.shape.num_nodes == AUTO_SIZES["num_speculative_tokens"]
    small = {"method": "mtp_tree", "shape": "auto", "num_speculative_tokens": 4}
    assert parse_settings(small).config.shape.num_steps == 4
    assert parse_settings({"method": "mtp_tree"}) == parsed
    for sized in ({"topk": 2}, {"num_steps": 2}, {"num_speculative_tokens": 7}):
        assert not parse_settings({"method": "mtp_tree", **sized}).config.auto
    assert not parse_settings({"method": "mtp_tree", "shape": "fixed"}).config.auto
    least = {"method": "mtp_tree", "shape": "auto", "num_speculative_tokens": 2}
    assert parse_settings(least).config.shape == TreeShape(2, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"num_steps": 1}, TreeShape(1, 3, 3, 2)),
        ({"num_steps": 2, "topk": 2}, TreeShape(2, 2, 6)),
        ({"topk": 16}, TreeShape(6, 16, 16, 2)),
        ({"topk": 16, "frontier": 16}, TreeShape(5, 16, 16, 16)),
        ({"frontier": 4}, TreeShape(6, 4, 12, 4)),
        ({"frontier": 1}, TreeShape(6, 3, 12, 1)),
        ({"num_speculative_tokens": 2, "frontier": 2}, TreeShape(2, 2, 2, 2)),
        ({"topk": 32, "num_speculative_tokens": 63}, TreeShape(6, 32, 63, 2)),
    ],
)
def test_sizes_left_out_fit_those_given(sizes: dict, shape: TreeShape) -> None:
    """Catches: a refusal that blames a size which the user did not give."""
    parsed = parse_settings({"method": "mtp_tree", "shape": "auto", **sizes})
    assert parsed.config.shape == shape


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shape": "wide"}, 'must be "auto"'),
        ({"shape": "auto", "topk": 1}, "use topk from 2 to"),
        ({"shape": "auto", "topk": 4, "num_speculative_tokens": 3}, "use topk from 2"),
        ({"shape": "auto", "num_speculative_tokens": 1}, "of 2 or more"),
        ({"shape": "auto", "num_speculative_tokens": "x"}, "whole number"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, '"shape": "auto"'),
    ],
)
def test_bad_settings_say_what_to_change(settings: dict, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        parse_settings({"method": "mtp_tree", **settings})


def test_nodes_of_a_chain_are_the_sum_of_powers() -> None:
    assert tree_nodes(Rung(3, 3), 1, 0.5) == 0.5 + 0.25 + 0.125
    assert tree_nodes(OFF, 1, 0.5) == 0


def test_more_nodes_never_accept_less() -> None:
    for p in (0.1, 0.5, 0.9):
        for frontier in (1, 2, 3):
            found = [
                expected_nodes(Rung(n, 5, frontier=frontier), 3, p)
                for n in range(1, 15)
            ]
            assert found == sorted(found)


def test_a_wider_frontier_never_accepts_less() -> None:
    """And a chain's worth of nodes has no use for one."""
    for p in (0.2, 0.5, 0.9):
        for nodes in (2, 5, 12):
            found = [tree_nodes(Rung(nodes, 6, frontier=f), 3, p) for f in (1, 2, 3)]
            assert found == sorted(found)
    sure = [tree_nodes(Rung(5, 6, frontier=f), 3, 0.9) for f in (1, 3)]
    assert sure[0] == pytest.approx(sure[1])


def test_nodes_are_those_of_a_tree_counted_by_hand() -> None:
    """Catches: a frontier of other nodes than the best, or fewer."""
    for p in (0.1, 0.45, 0.7, 0.9):
        roots = [tree_nodes(Rung(n, 1), 3, p) for n in range(4)]
        shares = [after - before for before, after in itertools.pairwise(roots)]
        for nodes, steps, width in ((5, 3, 2), (7, 6, 1), (12, 4, 3), (30, 6, 2)):
            frontier, found = [1.0], []
            for _ in range(steps):
                level = [chance * share for chance in frontier for share in shares]
                found += level
                frontier = sorted(level)[-width:]
            best = sum(sorted(found)[-nodes:])
            rung = Rung(nodes, steps, frontier=width)
            assert tree_nodes(rung, 3, p) == pytest.approx(best)


def test_another_text_is_noticed_at_once() -> None:
    """Catches: 768 trees of the text before, which are a quarter of an hour of one
    slow request."""
    model = AcceptanceModel(LADDER, 3)
    small = equal_of(3)
    for _ in range(20):
        model.observe(small, [0, 1, 1, 2] * 32)
    before = model.predict(small)
    for _ in range(48):
        model.observe(small, [3])
    assert before < 2.2
    assert model.predict(small) > 3


def test_a_look_at_another_rung_interrupts_nothing() -> None:
    """One request; a comparison that began anew after each look would never end."""
    model = AcceptanceModel(LADDER, 3)
    small, large = equal_of(3), equal_of(7)

    def look(accepted: int, looks: int) -> None:
        for _ in range(looks):
            for _ in range(44):
                model.observe(small, [accepted])
            for _ in range(4):
                model.observe(large, [accepted])
        model.observe(small, [accepted])

    look(1, looks=40)
    before = model.predict(small)
    look(3, looks=2)
    assert before < 2.1
    assert model.predict(small) > 3.3
    # Nor does the rung take the credit.
    assert model.factors[small] == pytest.approx(1, abs=0.01)
    # After more than a look the rungs are compared.
    for rung in (large, small):
        for _ in range(64):
            model.observe(rung, [2])
    assert not model.is_learned


def test_uneven_text_makes_deep_trees_worth_more() -> None:
    """Catches: one chance for all text, whose powers fall too fast with the depth."""
    deep, p = Rung(6, 6), 0.7
    assert expected_nodes(deep, 1, p) > 1.02 * tree_nodes(deep, 1, p)


def draw(chance: float, nodes: int, rng: random.Random) -> int:
    """Nodes that a chain has accepted, whose mean is ``chance``."""
    whole = int(chance)
    return min(whole + (rng.random() < chance - whole), nodes)


@pytest.mark.parametrize("p", [0.3, 0.6, 0.85])
def test_the_model_learns_a_text_of_its_kind(p: float) -> None:
    """From one rung it finds what the others accept."""
    model = AcceptanceModel(LADDER, 3)
    rung, rng = equal_of(5), random.Random(0)
    mean = expected_nodes(LADDER[rung], 3, p)
    for _ in range(300):
        model.observe(rung, [draw(mean, 5, rng) for _ in range(100)])
    for other in range(1, len(LADDER)):
        wanted = 1 + expected_nodes(LADDER[other], 3, p)
        assert model.predict(other) == pytest.approx(wanted, rel=0.02)


def test_a_factor_learns_what_the_model_misses() -> None:
    """Two rungs used in turn, of which one accepts less than the model says."""
    model = AcceptanceModel(LADDER, 3)
    small, large = equal_of(3), len(LADDER) - 1
    for _ in range(60):
        for rung, counts in ((small, [0, 1, 2, 3]), (large, [0, 1, 2, 4])):
            for _ in range(20):
                model.observe(rung, counts * 8)
    model.observe(small, [0, 1, 2, 3] * 8)
    assert model.predict(small) - 1 == pytest.approx(1.5, rel=0.06)
    assert model.predict(large) - 1 == pytest.approx(1.75, rel=0.06)


def test_other_requests_teach_nothing_about_a_rung() -> None:
    """Catches: the last requests of a batch, which are hard to guess, blamed on the
    size that is chosen for so few."""
    model = AcceptanceModel(LADDER, 3)
    small, large = equal_of(3), equal_of(7)
    for _ in range(20):
        for _ in range(8):
            model.observe(small, [0, 1, 2, 3] * 32)
        for _ in range(8):
            model.observe(large, [0, 1, 1, 2] * 4)
    assert model.factors == [1.0] * len(LADDER)
    # Nor do they while a comparison is under way.
    for count in (128, 128, 100, 60, 30):
        model.observe(small, [0, 1, 2, 3] * (count // 4))
    assert model.factors == [1.0] * len(LADDER)
    for _ in range(4):
        model.observe(large, [0, 0, 1, 1] * 7)
    model.observe(small, [0, 1, 1, 2] * 7)
    assert model.factors[large] < 1


def test_few_requests_teach_little_about_a_rung() -> None:
    """One request is not like the many that the expectation comes from."""
    factors = []
    for count in (1, 64):
        model = AcceptanceModel(LADDER, 3)
        small, large = equal_of(3), equal_of(7)
        for _ in range(64 // count * 8):
            model.observe(small, [2] * count)
        for _ in range(64 // count * 4):
            model.observe(large, [1] * count)
        factors.append(model.factors[large])
    assert factors[1] < 0.95 < factors[0] < 1


def test_costs_interpolate_and_never_fall() -> None:
    assert interpolate((1, 3), (10.0, 20.0), 2) == 15
    assert interpolate((1, 3), (10.0, 20.0), 5) == 30
    assert interpolate((1, 3), (10.0, 20.0), 0) == 10
    assert interpolate((1, 3), (10.0, 8.0), 9) == 10


def test_costs_follow_what_steps_take() -> None:
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=False)
    before = costs.predict(4, 8, 1024)
    for _ in range(50):
        costs.observe(4, 8, 1024, 2 * before)
    assert costs.predict(4, 8, 1024) == pytest.approx(2 * before, rel=0.06)
    # The others are taken to be as wrong until they are seen.
    other = costs.table.predict(5, 8, 1024)
    assert costs.predict(5, 8, 1024) == pytest.approx(2 * other, rel=0.1)


def test_costs_not_seen_are_as_wrong_as_those_seen() -> None:
    """Catches: an error common to all, counted as that of the rungs in use alone."""
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=False)
    for _ in range(200):
        for rung in (1, 2):
            costs.observe(rung, 256, 1024, costs.table.predict(rung, 256, 1024) / 3)
    for rung in (1, 2, 5):
        wanted = costs.table.predict(rung, 256, 1024) / 3
        assert costs.predict(rung, 256, 1024) == pytest.approx(wanted, rel=0.05)
    # At another batch all is to be learned anew.
    costs.observe(1, 8, 1024, 10.0)
    assert max(costs.weights) <= 2


def test_measured_costs_hold_for_rungs_not_seen() -> None:
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=True)
    for _ in range(40):
        costs.observe(1, 8, 1024, 2 * costs.table.predict(1, 8, 1024))
    assert costs.ratios[1] > 1
    wanted = costs.table.predict(5, 8, 1024) * costs.common
    assert costs.predict(5, 8, 1024) == wanted
    costs.observe(1, 64, 1024, 10.0)
    assert costs.weights[1] > 30


@pytest.mark.parametrize("first", [0.8, 1.1, 1.3])
def test_first_steps_of_a_batch_say_nothing_about_a_rung(first: float) -> None:
    """Catches: all sizes taken to be slower and the running one to be faster, a little
    more at each change of the batch, until nothing else could win."""
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=True)
    rung = len(LADDER) - 1
    for _ in range(200):
        for batch in (8, 5, 3, 2, 1):
            usual = costs.table.predict(rung, batch, 1024)
            for times in (first, 1.0, 1.0, 1.0, 1.0, 1.0):
                costs.observe(rung, batch, 1024, times * usual)
    assert costs.ratios[rung] == pytest.approx(1, abs=0.02)
    assert costs.common == pytest.approx(1, abs=0.05)


def in_turn(costs: CostModel, dear: int, steps: int, batch: int = 8) -> None:
    """Two rungs used in turn, of which ``dear`` takes 8 % more than the table says."""
    for step in range(steps):
        rung, times = ((3, 1.0), (dear, 1.08))[step // 4 % 2]
        costs.observe(rung, batch, 1024, times * costs.table.predict(rung, batch, 1024))


def test_what_a_size_costs_against_another_is_learned_within_looks() -> None:
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=True)
    in_turn(costs, dear=5, steps=24)
    assert costs.ratios[5] / costs.ratios[3] == pytest.approx(1.08, abs=0.03)


def test_what_was_learned_of_a_size_grows_old() -> None:
    """Catches: a size shunned for ever for what it cost once."""
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=True)
    in_turn(costs, dear=5, steps=200)
    learned = costs.ratios[5] - 1
    for _ in range(10_000):
        costs.observe(3, 8, 1024, costs.table.predict(3, 8, 1024))
    assert 0 < costs.ratios[5] - 1 < 0.3 * learned


@pytest.mark.parametrize("is_measured", [True, False])
def test_what_was_learned_of_a_size_counts_less_at_another_batch(
    is_measured: bool,
) -> None:
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=is_measured)
    in_turn(costs, dear=5, steps=200)
    learned = costs.ratios[5] - 1
    costs.observe(3, 64, 1024, costs.table.predict(3, 64, 1024) * costs.common)
    assert 0 < costs.ratios[5] - 1 < (0.8 if is_measured else 0.5) * learned


def test_costs_are_sound_after_many_steps() -> None:
    """The covariance is that of something, and what is seen is still believed."""
    costs, rng = CostModel(default_table(LADDER), len(LADDER), True), random.Random(0)
    for _ in range(50_000):
        rung, batch = rng.randrange(len(LADDER)), rng.choice((1, 7, 8, 200))
        usual = costs.table.predict(rung, batch, 1024)
        costs.observe(rung, batch, 1024, usual * rng.lognormvariate(0, 0.1))
    assert np.allclose(costs.covariance, costs.covariance.T, atol=1e-12)
    assert np.linalg.eigvalsh(costs.covariance).min() > 0
    for _ in range(100):
        costs.observe(1, 8, 1024, 1.2 * costs.table.predict(1, 8, 1024))
    wanted = 1.2 * costs.table.predict(1, 8, 1024)
    assert costs.predict(1, 8, 1024) == pytest.approx(wanted, rel=0.03)


def test_one_slow_step_counts_for_little() -> None:
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=False)
    usual = costs.predict(4, 8, 1024)
    for _ in range(40):
        costs.observe(4, 8, 1024, usual)
    costs.observe(4, 8, 1024, 100 * usual)
    assert costs.predict(4, 8, 1024) < 1.05 * usual


@pytest.mark.parametrize("ms", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_times_change_nothing(ms: float) -> None:
    """Catches: a factor of 0, by which the next step would divide."""
    costs = CostModel(default_table(LADDER), len(LADDER), is_measured=False)
    before = costs.predict(4, 8, 1024)
    for _ in range(2):
        costs.observe(4, 8, 1024, ms)
    assert costs.predict(4, 8, 1024) == before


def test_points_not_measured_are_filled_in() -> None:
    found = {(0, 1, 1): 10.0, (0, 1, 8): 12.0, (0, 9, 1): 20.0, (0, 9, 8): 24.0}
    found |= {(1, 1, 1): 15.0, (1, 1, 8): 14.0}
    table = fill_table(found, 2, [1, 8], [1, 9])
    assert table.times[1] == ((15.0, 15.0), (30.0, 30.0))


def test_a_longer_context_adds_as_much_for_every_request() -> None:
    """Catches: a small batch charged for the share that a large one reads."""
    batches, contexts = [1, 2, 4, 16, 32], [1, 9]
    found = {(0, 1, batch): 10.0 + batch for batch in batches}
    found |= {(0, 9, batch): 10.0 + 3 * batch for batch in (4, 32)}
    table = fill_table(found, 1, batches, contexts)
    assert table.times[0][1] == tuple(10.0 + 3 * batch for batch in batches)


def test_a_context_that_was_not_measured_goes_on_as_before() -> None:
    """Catches: the longest contexts as cheap as shorter ones, when the budget ends."""
    found = {
        (r, c, b): 10.0 + r + c * b for r in (0, 1) for c in (1, 9) for b in (1, 8)
    }
    table = fill_table(found, 2, [1, 8], [1, 9, 33])
    assert table.contexts == (1, 9)
    for rung in (0, 1):
        assert table.predict(rung, 8, 33) == pytest.approx(10 + rung + 33 * 8)


def test_a_budget_leaves_out_small_batches_of_long_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: large ones that follow from the difference of two short steps."""
    now, steps = [0.0], []

    def run_step(rung: Rung, batch: int, context: int) -> None:
        steps.append((rung.num_nodes, batch, context))
        now[0] += 1e-3 * (10 + rung.num_nodes + batch * context / 1024)

    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(profile, "BUDGET", 5.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    limits = SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=8192)
    config = SimpleNamespace(
        scheduler_config=limits, model_config=SimpleNamespace(max_model_len=16384)
    )
    ladder = [OFF, Rung(3, 3), Rung(12, 6)]
    table = measure(config, ladder, run_step, lambda answer: answer)
    long = [batch for _, batch, context in steps if context == 8192]
    assert long[0] == 64
    assert 1 not in long
    for batch in (1, 8, 64):
        assert table.predict(2, batch, 8192) == pytest.approx(22 + batch * 8, rel=0.01)


def test_tokens_measured_with_repeat_within_a_request() -> None:
    torch.manual_seed(0)
    ids = torch.arange(64 * 13 + 5)
    repeat_some(ids, 64)
    assert torch.equal(ids[-5:], torch.arange(64 * 13, 64 * 13 + 5))
    rows = ids[:-5].view(64, 13)
    begins = torch.arange(64)[:, None] * 13
    assert bool((rows >= begins).all())
    assert bool((rows <= begins + torch.arange(13)).all())
    repeats = [13 - len(row.unique()) for row in rows]
    wanted = sum(j / (j + NEW_WORDS) for j in range(13))
    assert sum(repeats) / 64 == pytest.approx(wanted, rel=0.05)
    assert max(repeats) - min(repeats) <= 1
    # Later rows more often.
    again = [len(rows[:, j].lt(begins[:, 0] + j).nonzero()) for j in (1, 12)]
    assert again[1] > 3 * again[0] > 0


def test_sizes_of_large_batches_cost_before_them_what_they_cost_there() -> None:
    found = {(0, 1, 1): 10.0, (0, 1, 8): 11.0, (0, 1, 32): 12.0, (0, 1, 64): 13.0}
    found |= {(1, 1, 32): 20.0, (1, 1, 64): 22.0}
    table = fill_table(found, 2, [1, 8, 32, 64], [1])
    assert table.times[1] == ((20.0, 20.0, 20.0, 22.0),)


def test_cost_file_round_trip() -> None:
    table = default_table(LADDER)
    assert CostTable.from_json(table.to_json("k", LADDER), "k", LADDER) == table


def _broken(**changes: object) -> str:
    return json.dumps(json.loads(default_table(LADDER).to_json("k", LADDER)) | changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no cost file"),
        ("[1, 2]", "no cost file"),
        (_broken(key="other"), "another model"),
        (_broken(version=99), "another model"),
        (_broken(rungs=[[0, 0]]), "other tree sizes"),
        (_broken(times_ms=[]), "incomplete"),
        (_broken(times_ms=[[[1.0] * 4]] * (len(LADDER) - 1) + [[[0.0] * 4]]), "incomp"),
        (_broken(batches="x"), "no cost file"),
    ],
)
def test_a_broken_cost_file_is_named(text: str, words: str) -> None:
    with pytest.raises(CostCacheError, match=words):
        CostTable.from_json(text, "k", LADDER)


def test_random_bytes_are_no_cost_file(tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(random.Random(0).randbytes(100))
    with pytest.raises(CostCacheError):
        CostTable.load(path, "k", LADDER)
