"""``vllm-mtp tune``: what it asks for, and what it makes of measurements."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_mtp.auto.ladder import Rung
from vllm_mtp.cli import tune as module
from vllm_mtp.cli.main import app
from vllm_mtp.tuning.report import plot, recommend
from vllm_mtp.tuning.run import ChoiceWatch, cut_prompts
from vllm_mtp.tuning.shapes import Shape


def rows_of(rates: dict[str, dict[int, float]]) -> list[dict]:
    return [
        {"shape": s, "batch": b, "tok_s": r, "accept_length": 2.0, "step_ms": 1.0}
        for s, found in rates.items()
        for b, r in found.items()
    ]


RATES = {
    "off": {1: 100.0, 64: 2000.0},
    "chain:3": {1: 220.0, 64: 4000.0},
    "tree:3,4,7": {1: 200.0, 64: 5000.0},
}
AUTOS = ("auto", "auto:shared")
CONFIGS = {name: Shape.parse(name).speculative for name in [*RATES, *AUTOS]}


def test_the_best_over_all_batches_is_recommended() -> None:
    found = recommend(rows_of(RATES), CONFIGS)
    assert found["shape"] == "tree:3,4,7"
    assert found["speculative_config"]["method"] == "mtp_tree"
    assert found["best"] == {1: "chain:3", 64: "tree:3,4,7"}


@pytest.mark.parametrize(("rate", "shape"), [(1.0, "auto"), (0.9, "tree:3,4,7")])
def test_auto_is_recommended_when_it_is_level(rate: float, shape: str) -> None:
    auto = {batch: rate * RATES["tree:3,4,7"][batch] for batch in (1, 64)}
    found = recommend(rows_of({**RATES, "auto": auto}), CONFIGS)
    assert found["shape"] == shape


def test_auto_with_shared_nodes_is_no_fixed_shape() -> None:
    """Catches: ``auto`` recommended as level with the one that is better."""
    best = RATES["tree:3,4,7"]
    rates = {
        name: {batch: share * rate for batch, rate in best.items()}
        for name, share in zip(AUTOS, (1.0, 1.01), strict=True)
    }
    found = recommend(rows_of({**RATES, **rates}), CONFIGS)
    assert found["shape"] == "auto:shared"
    assert found["speculative_config"]["share_nodes"] is True
    assert found["why"].startswith("1.01x the best fixed shape (tree:3,4,7)")
    # Without a fixed one to compare with.
    found = recommend(rows_of(rates), CONFIGS)
    assert found["shape"] == "auto:shared"
    assert "fixed" not in found["why"]


def test_speculation_that_does_not_pay_is_not_recommended() -> None:
    rates = {"off": {8: 900.0}, "chain:3": {8: 500.0}}
    assert recommend(rows_of(rates), CONFIGS)["speculative_config"] is None


def test_plot_has_a_bar_for_each() -> None:
    lines = plot(rows_of(RATES)).splitlines()
    assert sum("tok/s" in line for line in lines) == 6
    assert lines[1].startswith("  chain:3")


def test_names_of_shapes() -> None:
    shape = Shape.parse("tree:6,3,7,1")
    assert (shape.num_steps, shape.topk, shape.num_nodes, shape.frontier) == (
        6,
        3,
        7,
        1,
    )
    assert shape.speculative == {
        "method": "mtp_tree",
        "num_steps": 6,
        "topk": 3,
        "num_speculative_tokens": 7,
        "frontier": 1,
    }
    assert shape.capture_sizes([1, 4]) == [1, 4, 8, 32]
    # EAGLE-2's own: as before there was a choice.
    whole = Shape.parse("tree:6,3,7")
    assert whole.frontier == 3
    assert "frontier" not in whole.speculative
    assert whole.capture_sizes([1, 4]) == [3, 8, 12, 32]
    auto = Shape.parse("auto")
    assert (auto.topk, auto.frontier) == (3, 2)
    assert {1, 2, 4, 8} <= set(auto.capture_sizes([1, 4]))
    assert Shape.parse("off").frontier == Shape.parse("chain:3").frontier == 1


@pytest.mark.parametrize("name", ["tree:6,3", "tree:6,3,7,1,1", "tree", "tree:6,3,7:1"])
def test_what_is_no_shape_is_said(name: str) -> None:
    with pytest.raises(ValueError, match=r"tree:STEPS,TOPK,NODES\[,FRONTIER\]"):
        Shape.parse(name)


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_prompts_have_the_length_and_begin_differently() -> None:
    prompts = cut_prompts(Tokenizer(), ["abc", "defgh"], 12, 40)
    assert {len(p) for p in prompts} == {40}
    assert len({tuple(p[:8]) for p in prompts}) == 12


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--shapes", "wide"], "'wide'"),
        (["--shapes", "auto:wide"], "auto:shared"),
        (["--shapes", "tree:3-4"], "tree:S-k-N[-F]"),
        (["--shapes", "tree:3-4-99"], "num_speculative_tokens"),
        (["--shapes", "tree:3-4-7-5"], "frontier=5 is out of range"),
        (["--batches", "1,x"], "whole numbers"),
        (["--batches", "0"], "1 or more"),
        (["--engine-args", "[]"], "JSON object"),
        (["--engine-args", "{"], "no JSON"),
        (["--engine-args", '{"speculative_config": {}}'], "use --shapes"),
        (["--prompts", "/nowhere"], "prompts"),
    ],
)
def test_bad_options_say_what_to_change(args: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["tune", "MODEL", *args])
    assert result.exit_code == 1
    assert words in result.output


def test_failed_shapes_are_named_and_the_rest_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    def measure_all(job, shapes, report):
        for shape in shapes:
            if shape.name == "off":
                report(shape.name, [], "RuntimeError: no memory")
            else:
                report(shape.name, rows_of({shape.name: RATES[shape.name]}), "")

    monkeypatch.setattr(module, "measure_all", measure_all)
    path = tmp_path / "out.json"
    result = CliRunner().invoke(
        app,
        ["tune", "MODEL", "--shapes", "off,chain:3,tree:3-4-7", "--output", str(path)],
    )
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["failed"] == {"off": "RuntimeError: no memory"}
    assert found["recommended"]["shape"] == "tree:3,4,7"
    assert "--speculative-config" in result.output


def test_a_file_that_cannot_be_written_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Measuring took long: the table is printed before the refusal."""

    def measure_all(job, shapes, report):
        for shape in shapes:
            report(shape.name, rows_of({shape.name: RATES[shape.name]}), "")

    monkeypatch.setattr(module, "measure_all", measure_all)
    options = ["--shapes", "chain:3", "--output", str(tmp_path / "no" / "out.json")]
    result = CliRunner().invoke(app, ["tune", "MODEL", *options])
    assert result.exit_code == 1
    assert "cannot be written" in result.output
    assert "Recommended: chain:3" in result.output


def test_what_auto_used_is_not_what_it_ended_with() -> None:
    policy = SimpleNamespace(ladder=(Rung(0, 0), Rung(3, 3), Rung(3, 6, 6)), current=2)
    scheduler = SimpleNamespace(shape_policy=policy)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    watch = ChoiceWatch(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert watch.most_used() == [3, 6, 6]
    for step in range(1, 8):
        policy.current = 1 if step < 6 else 0
        watch(step)
    assert watch.most_used() == [3, 3]
