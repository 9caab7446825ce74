"""The one warning about a drafter that is never accepted."""

import logging

import pytest

from vllm_mtp.acceptance_watch import MIN_STEPS, AcceptanceWatch
from vllm_mtp.config import SettingsError


@pytest.fixture
def watch() -> AcceptanceWatch:
    return AcceptanceWatch(min_steps=100, min_accepted_per_step=0.02)


@pytest.fixture(autouse=True)
def logs(caplog, monkeypatch):
    """vLLM's root logger does not propagate once vLLM is imported."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def test_warns_once_with_the_measured_rate(watch, logs):
    assert not watch.update(99, 0), "too few steps for a judgement"
    assert watch.update(200, 1)
    assert not watch.update(400, 1)
    assert not watch.update(10_000, 1)
    assert len(logs.records) == 1
    message = logs.records[0].getMessage()
    assert "0.0050 tokens per step over 200 counted steps" in message
    assert "vllm-mtp inspect" in message


def test_rate_at_the_limit_is_accepted(watch, logs):
    assert not watch.update(100, 2)
    assert not logs.records


def test_a_good_start_does_not_hide_a_later_fault(watch, logs):
    """With totals since the start the rate would stay at 0.5 for long."""
    assert not watch.update(10_000, 10_000)
    assert not watch.update(10_050, 10_000), "50 new steps are too few"
    assert watch.update(10_100, 10_000)


def test_reset_counters_start_anew(watch):
    assert not watch.update(1000, 800)
    assert not watch.update(50, 0), "fewer steps than before: the counters were reset"
    assert watch.update(150, 0)


def test_never_judges_without_drafts(watch, logs):
    for _ in range(3):
        assert not watch.update(0, 0)
    assert not logs.records


@pytest.mark.parametrize("steps", [0, -1])
def test_refuses_impossible_steps(steps):
    with pytest.raises(SettingsError, match=f"min_steps={steps} must be 1 or more"):
        AcceptanceWatch(min_steps=steps)


def test_default_judges_after_a_thousand_steps():
    watch = AcceptanceWatch()
    assert not watch.update(MIN_STEPS - 1, 0)
    assert watch.update(MIN_STEPS, 0)
