"""Counts on their way: names, the channel, the log line, Prometheus, the timer."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
import torch

from vllm_mtp import compat
from vllm_mtp.auto.ladder import OFF, Rung
from vllm_mtp.config import MTPConfig, SettingsError, TreeShape, parse_settings
from vllm_mtp.metrics.counts import PHASES, REASONS, note_of, totals
from vllm_mtp.metrics.timing import PhaseTimer
from vllm_mtp.scheduler import TreeSchedulerMixin

COUNTS = {
    "nodes_drafted": 180,
    "nodes_verified": 31,
    "passes/7": 3,
    "passes/12": 1,
    "steps_without_drafts/prefill": 1,
}


def make_stats(counts: dict[str, int], num_drafts: int) -> Any:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    drafts = SpecDecodingStats(num_spec_tokens=7, num_drafts=num_drafts)
    stats = SchedulerStats(spec_decoding_stats=drafts if num_drafts else None)
    compat.send_counts(stats, counts)
    return stats


def make_logger(**config: Any) -> Any:
    from vllm_mtp.metrics.stat_logger import TreeStatLogger

    registry = prometheus_client.CollectorRegistry()

    def counter(**kwargs: Any) -> prometheus_client.Counter:
        return prometheus_client.Counter(registry=registry, **kwargs)

    vllm_config = SimpleNamespace(
        additional_config={"vllm_mtp": MTPConfig(**config).to_dict()},
        model_config=SimpleNamespace(served_model_name="tiny"),
    )
    return TreeStatLogger(vllm_config, [0, 1], counter), registry


def values(registry: Any) -> dict[str, float]:
    """Samples of engine 1, by name and own label."""
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            labels = dict(sample.labels)
            if sample.name.endswith("_total") and labels.pop("engine") == "1":
                assert labels.pop("model_name") == "tiny"
                name = sample.name.removeprefix("vllm:mtp_tree_")
                found["/".join([name, *labels.values()])] = sample.value
    return found


def test_counts_survive_the_way_to_the_front_end() -> None:
    """As the engine's process sends them, beside a LoRA adapter."""
    from vllm.v1.metrics.stats import SchedulerStats

    stats = make_stats(COUNTS, 4)
    stats.waiting_lora_adapters["mine"] = 2
    sent = msgspec.msgpack.encode(stats)
    arrived = msgspec.msgpack.decode(sent, type=SchedulerStats)
    assert compat.receive_counts(arrived) == COUNTS
    assert arrived.waiting_lora_adapters == {"mine": 2}
    assert compat.receive_counts(arrived) == {}


def test_totals_begin_at_zero_and_only_rise() -> None:
    logger, registry = make_logger()
    start = values(registry)
    expected = {"nodes_drafted_total", "nodes_verified_total", "passes_total/7"}
    expected |= {f"steps_without_drafts_total/{reason}" for reason in REASONS}
    assert start == dict.fromkeys(expected, 0.0)
    logger.record(make_stats(COUNTS, 4), None, engine_idx=1)
    once = values(registry)
    assert once["nodes_drafted_total"] == 180
    assert once["passes_total/12"] == 1
    logger.record(make_stats({}, 0), None, engine_idx=1)
    logger.record(None, None, engine_idx=1)
    logger.log()
    assert values(registry) == once
    logger.record(make_stats(COUNTS, 4), None, engine_idx=1)
    assert values(registry) == {name: 2 * value for name, value in once.items()}
    assert not any(math.isnan(value) for value in once.values())


@pytest.mark.parametrize("asked", [{"timing": True}, {"trace": {"path": "t"}}, {}])
def test_phases_are_there_when_asked_for(asked: dict[str, Any]) -> None:
    _, registry = make_logger(**asked)
    phases = {k.split("/")[1] for k in values(registry) if "phase" in k}
    assert phases == (set(PHASES) if asked else set())


def test_every_width_of_auto_is_there_from_the_start() -> None:
    _, registry = make_logger(shape=TreeShape(5, 4, 24), auto=True)
    widths = {int(k.split("/")[1]) for k in values(registry) if "passes" in k}
    assert {0, 1, 24} < widths


def test_the_log_line() -> None:
    from vllm_mtp.metrics.stat_logger import describe

    phases = {"phase_microseconds/drafting": 30, "phase_microseconds/verifying": 70}
    assert describe({**COUNTS, **phases, "steps": 4}) == (
        "nodes drafted per step: 36.0, verified per step: 7.8, passes by nodes: 7: 3, "
        "12: 1, steps without drafts: 1 (prefill: 1), time: drafting: 30%, verifying: "
        "70%, bookkeeping: 0%"
    )


def test_an_idle_interval_has_no_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has it the figures of the interval before, or a division by zero."""
    from vllm_mtp.metrics import stat_logger

    logger, _ = make_logger()
    said: list[str] = []
    monkeypatch.setattr(
        stat_logger.logger, "info", lambda *words: said.append(words[1])
    )
    logger.record(make_stats(COUNTS, 4), None)
    logger.log()
    logger.record(make_stats({}, 0), None)
    logger.log()
    assert len(said) == 1
    assert "nan" not in said[0]


def test_names_are_shown_by_get_metrics_and_not_taken_for_vllms() -> None:
    from vllm_mtp.metrics.counts import PREFIX

    for name, total in totals(MTPConfig(timing=True)).items():
        assert (PREFIX + name).startswith("vllm:")
        # vLLM's own serving benchmark takes whatever begins like this for its own.
        assert not (PREFIX + name).startswith("vllm:spec_decode")
        assert total.help.endswith(".")


def test_a_note_travels_with_the_output_of_either_kind() -> None:
    inner = SimpleNamespace()
    note = note_of(
        4, Rung(7, 2, frontier=4), new_chains=("a",), phase_us={"drafting": 3}
    )
    compat.hang_pass_note(SimpleNamespace(model_runner_output=inner), note)
    assert compat.take_pass_note(inner) is note
    plain = SimpleNamespace()
    assert compat.take_pass_note(plain) is None
    compat.hang_pass_note(plain, note)
    assert compat.take_pass_note(plain) is note
    assert (note.nodes_per_tree, note.nodes_per_chain) == (4 + 16, 2)
    assert note_of(4, Rung(7, 3, frontier=1)).nodes_per_tree == 4 + 4 + 4
    assert note_of(4, OFF).nodes_per_tree == 0


def test_the_timer_tells_phases_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_mtp.metrics import timing

    clock = iter([0.0, 0.010, 0.011, 0.015, 1.0, 1.020])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timer = PhaseTimer(torch.device("cpu"))
    timer.mark("drafting")
    assert timer.take_us() == {}
    assert timer.last_ms("drafting")() is None
    timer.begin()
    for phase in ("verifying", "bookkeeping", "drafting"):
        timer.mark(phase)
    timer.end()
    timer.mark("drafting")
    assert timer.last_ms("drafting")() == 4.0
    assert timer.take_us() == {
        "verifying": 10000,
        "bookkeeping": 1000,
        "drafting": 4000,
    }
    assert timer.take_us() == {}
    timer.begin()
    timer.mark("verifying")
    assert timer.last_ms("verifying")() == 20.0
    assert timer.take_us() == {"verifying": 20000}


def test_events_that_are_not_over_are_left_for_later() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    timer.begin()
    timer.mark("verifying")
    timer.mark("drafting")
    late = timer._pending[1][2]
    late.query = lambda: False
    assert set(timer.take_us()) == {"verifying"}
    late.query = lambda: True
    assert set(timer.take_us()) == {"drafting"}


def test_timing_is_a_flag() -> None:
    assert parse_settings({"method": "mtp_tree", "timing": True}).config.timing
    assert not parse_settings({"method": "mtp_tree"}).config.timing
    with pytest.raises(SettingsError, match="timing='yes' must be true or false"):
        parse_settings({"method": "mtp_tree", "timing": "yes"})


def test_a_step_of_nothing_asks_for_no_drafts() -> None:
    """Catches: a pass after it that is counted under another reason than its own."""
    scheduled = [({"r": 1}, 0), ({}, 15), ({"r": 1}, 3), ({"r": 4}, 3)]
    steps = iter(
        SimpleNamespace(num_scheduled_tokens=tokens, num_spec_tokens_to_schedule=asked)
        for tokens, asked in scheduled
    )

    class Stock:
        def schedule(self) -> Any:
            return next(steps)

    class Scheduler(TreeSchedulerMixin, Stock):  # type: ignore[misc]
        def __init__(self) -> None:
            self._drafts_asked = 15

    scheduler = Scheduler()
    assert [scheduler.schedule().mtp_drafts_asked for _ in scheduled] == [15, 0, 0, 3]
