"""The load ramp's schedule, what it counts, and what it makes of two engines."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks.serving import ramp
from benchmarks.serving.ramp import Requests, Tally, Traffic
from benchmarks.serving.schedule import (
    Schedule,
    make_rows,
    make_stages,
    sliding_minimum,
    worst_span,
)
from vllm_mtp.auto.acceptance import AcceptanceModel
from vllm_mtp.auto.costs import CostModel, default_table
from vllm_mtp.auto.ladder import build_ladder
from vllm_mtp.auto.policy import Policy
from vllm_mtp.config import TreeShape

LADDER = build_ladder(TreeShape(6, 3, 14), may_share=True)
SCHEDULE = Schedule((1, 4, 1), 10, 2.5)


def test_stages_are_cut_into_windows() -> None:
    assert SCHEDULE.num_windows == 12
    assert [SCHEDULE.window_at(s) for s in (0, 2.4, 2.5, 29.9, 30, 99)] == [
        *(0, 0, 1),
        *(11, 12, 12),
    ]
    assert [SCHEDULE.concurrency_of(w) for w in (0, 3, 4, 7, 8)] == [1, 1, 4, 4, 1]
    texts = [SCHEDULE.text_of(w) for w in range(6)]
    assert texts == ["easy", "easy", "hard", "hard", "easy", "easy"]


@pytest.mark.parametrize("window", [3.0, 10.0])
def test_a_window_of_both_texts_is_refused(window: float) -> None:
    with pytest.raises(ValueError, match="no whole number of windows"):
        Schedule((1,), 10, window)


def test_settling_is_the_last_change_of_a_stage() -> None:
    changes = [0.5, 12.0, 14.0, 21.0, 27.5]
    found = [list(row.values()) for row in make_stages(SCHEDULE, changes)]
    assert found == [
        [0, 1, 0.5, 0.5, 0.0],
        [1, 4, 4.0, 4.0, 0.0],
        [2, 1, 7.5, 1.0, 2.5],
    ]


def test_the_worst_span_is_a_ratio_of_sums() -> None:
    """Not a mean of ratios, and never over windows without a number of ``off``."""
    off, auto = [100.0, 300.0, 100.0, 0.0, 0.0], [100.0, 200.0, 300.0, 5.0, 5.0]
    assert sliding_minimum(auto, off, 1) == 0.667
    assert sliding_minimum(auto, off, 2) == 0.75
    assert sliding_minimum(auto, off, 6) is None


def test_rows_compare_the_same_window() -> None:
    schedule = Schedule((8,), 10, 5)
    off: dict[str, Any] = {"windows": [{"tok_s": 100.0}, {"tok_s": 200.0}]}
    auto: dict[str, Any] = {
        "windows": [{"tok_s": 150.0, "chose": [[3, 3, 1.0]]}, {"tok_s": 180.0}]
    }
    easy, hard = make_rows(schedule, {"off": off, "auto": auto})
    assert easy == {
        "second": 0,
        "stage": 0,
        "concurrency": 8,
        "text": "easy",
        "off_tok_s": 100.0,
        "auto_tok_s": 150.0,
        "auto_chose": [[3, 3, 1.0]],
        "auto_over_off": 1.5,
    }
    assert (hard["text"], hard["auto_over_off"]) == ("hard", 0.9)
    assert worst_span(schedule, {"off": off, "auto": auto}) == 1.1
    assert worst_span(schedule, {"off": off}) is None
    assert "auto_over_off" not in make_rows(schedule, {"off": off})[0]


def test_requests_follow_from_their_number() -> None:
    requests = Requests([[0, 7, 7], [0, 8, 8]], 50, (32, 160))
    prompt, params = requests.make(3, "easy")
    assert (prompt, params.temperature) == ([0, 8, 8], 0)
    hard, sampled = requests.make(3, "hard")
    assert hard == requests.make(3, "hard")[0] != prompt
    assert sampled.temperature == ramp.HARD_TEMPERATURE
    assert sampled.max_tokens == params.max_tokens
    made = [requests.make(number, "hard") for number in range(200)]
    assert len({tuple(prompt) for prompt, _ in made}) > 195
    assert all(0 <= token < 50 for prompt, _ in made for token in prompt)
    lengths = {params.max_tokens for _, params in made}
    assert min(lengths) >= 32
    assert max(lengths) <= 160
    assert len(lengths) > 50


@dataclass
class Engine:
    """Steps of 0.1 s; each request emits one token first, then two a step.

    Requests have 9, 11 or 13 tokens.
    """

    observe: Callable[["Engine"], None] = lambda engine: None
    now: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    is_new: dict[str, bool] = field(default_factory=dict)
    added: list[tuple[float, str]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    reason: str = "length"
    policy: Any = None

    def __post_init__(self) -> None:
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(
                scheduler=SimpleNamespace(shape_policy=self.policy)
            )
        )

    def make(self, number: int, text: str) -> Any:
        self.added.append((self.now, text))
        return [1], 9 + 2 * (number % 3)

    def add_request(self, request_id: str, prompt: Any, num_tokens: int) -> None:
        self.left[request_id] = num_tokens
        self.is_new[request_id] = True

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            del self.left[name]

    def step(self) -> list[Any]:
        self.observe(self)
        self.now += 0.1
        self.running.append(len(self.left))
        outputs = []
        for name, left in list(self.left.items()):
            new = 1 if self.is_new[name] else 2
            self.is_new[name] = False
            self.left[name] = left - new
            is_done = left == new
            text = SimpleNamespace(token_ids=[5] * new, finish_reason=self.reason)
            outputs.append(
                SimpleNamespace(
                    request_id=f"{name}-8c1f", outputs=[text], finished=is_done
                )
            )
            if is_done:
                del self.left[name]
        return outputs


def drive(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """The traffic of ``SCHEDULE`` on the engine's clock."""
    clock = SimpleNamespace(perf_counter=lambda: engine.now)
    monkeypatch.setattr(ramp, "time", clock)
    traffic = Traffic(SimpleNamespace(llm_engine=engine), SCHEDULE, engine.make)
    seen: list[int] = []
    traffic.run(lambda window, tally: seen.append(window))
    if not traffic.failed:
        assert seen == list(range(SCHEDULE.num_windows))
        assert not engine.left
    return traffic


def test_traffic_follows_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    traffic = drive(engine, monkeypatch)
    stages = [engine.running[at + 10 : at + 90] for at in (0, 100, 200)]
    assert [set(stage) for stage in stages] == [{1}, {4}, {1}]
    # The surplus goes at once where concurrency falls.
    assert set(engine.running[203:]) == {1}
    assert 1 <= traffic.aborted <= 3
    # Steps end on either side of a border.
    easy = [at % 10 for at, text in engine.added if text == "easy"]
    hard = [at % 10 for at, text in engine.added if text == "hard"]
    assert all(at < 5.1 or at > 9.9 for at in easy)
    assert all(at < 0.1 or at > 4.9 for at in hard)
    assert min(len(easy), len(hard)) > 30
    assert (traffic.finished + traffic.aborted, traffic.failed) == (traffic.added, 0)


def test_traffic_counts_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = drive(engine := Engine(), monkeypatch).tallies[5]
    assert tally.steps in (24, 25, 26)
    assert tally.running == 4 * tally.steps
    first_tokens = tally.running - tally.passes
    added = sum(12.5 <= at < 15 for at, _ in engine.added)
    assert abs(first_tokens - added) <= 4
    assert tally.decoded == 2 * tally.passes
    assert tally.tokens == tally.decoded + first_tokens
    assert 0 < tally.mixed < tally.steps
    report = tally.report(2.5)
    assert report["tok_s"] == round(tally.tokens / 2.5, 1)
    assert report["accept_length"] == 2
    assert "chose" not in report


def test_traffic_notes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def switch(engine: Engine) -> None:
        engine.policy.current = 4 if engine.now > 11 else 1

    policy = Policy(
        LADDER,
        AcceptanceModel(LADDER, 3),
        CostModel(default_table(LADDER), len(LADDER), is_measured=False),
    )
    traffic = drive(Engine(switch, policy=policy), monkeypatch)
    assert traffic.changes == [0.1, pytest.approx(11.1, abs=0.2)]
    first, second = traffic.tallies[4].report(2.5)["chose"]
    assert (first[:2], second[:2]) == ([3, 3], [1, 1])
    assert first[2] + second[2] == pytest.approx(1)
    assert first[2] == pytest.approx(0.6, abs=0.07)
    assert traffic.tallies[7].report(2.5)["chose"] == [[3, 3, 1.0]]


def test_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = drive(Engine(reason="abort"), monkeypatch)
    assert aborted.failed == aborted.finished > 0

    def fail(engine: Engine) -> None:
        if engine.now > 15:
            raise RuntimeError("the engine is dead")

    dead = drive(Engine(fail), monkeypatch)
    assert dead.failed == 4
    assert dead.tallies[0].tokens > 0
    assert dead.tallies[-1] == Tally()


@pytest.mark.parametrize(
    ("key", "value"), [("commit", "0000000"), ("window", 2.0), (None, None)]
)
def test_only_engines_of_the_same_code_and_schedule_are_joined(
    tmp_path: Path, key: str | None, value: Any
) -> None:
    """Catches: an engine of an older commit kept under the new one."""
    made: Any = object.__new__(ramp.Ramp)
    made.args = SimpleNamespace(out=tmp_path / "ramp.json")
    made.settings = {"window": 4.0}
    record = {"commit": ramp.git_commit(), "window": 4.0, "measured": {"off": {}}}
    made.args.out.write_text(
        json.dumps(record if key is None else {**record, key: value})
    )
    if key is None:
        assert made._load() == {"off": {}}
    else:
        with pytest.raises(SystemExit, match=f"{key}={value}"):
            made._load()
