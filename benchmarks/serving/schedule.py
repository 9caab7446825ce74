"""What `ramp.py` runs when, and what its tables say of the engines' windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPAN = 10.0
"""Seconds of the sliding windows whose worst is reported."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """Stages of one concurrency each, easy text first, then hard, cut into windows."""

    concurrency: tuple[int, ...]
    """One a stage."""

    stage_seconds: float
    window: float
    """Seconds; each half of a stage is a whole number of windows."""

    def __post_init__(self) -> None:
        count = self.stage_seconds / 2 / self.window
        if round(count) < 1 or abs(count - round(count)) > 1e-6:
            raise ValueError(
                f"half a stage of {self.stage_seconds} s is no whole number of windows "
                f"of {self.window} s"
            )

    @property
    def windows_per_half(self) -> int:
        """Windows in which a stage keeps its text."""
        return round(self.stage_seconds / 2 / self.window)

    @property
    def num_windows(self) -> int:
        """Of all stages."""
        return len(self.concurrency) * 2 * self.windows_per_half

    def window_at(self, seconds: float) -> int:
        """The window of a time since the start; past the end, ``num_windows``."""
        return min(int(seconds / self.window), self.num_windows)

    def stage_of(self, window: int) -> int:
        """The stage that a window belongs to."""
        return window // (2 * self.windows_per_half)

    def text_of(self, window: int) -> str:
        """``easy`` or ``hard``."""
        half = window // self.windows_per_half
        return "hard" if half % 2 else "easy"

    def concurrency_of(self, window: int) -> int:
        """Requests that shall run."""
        return self.concurrency[self.stage_of(window)]

    def settle_seconds(self, changes: Sequence[float], half: int) -> float:
        """Time from the start of half a stage to the last change of rung in it.

        Args:
            changes: Times of all changes, since the start.
            half: Counted through all stages.
        """
        begin = half * self.stage_seconds / 2
        end = begin + self.stage_seconds / 2
        return max((at - begin for at in changes if begin <= at < end), default=0.0)


def sliding_minimum(
    auto: Sequence[float], off: Sequence[float], count: int
) -> float | None:
    """Smallest ratio of the sums over ``count`` windows in a row.

    Spans in which ``off`` made nothing say nothing; None: there are no others.
    """
    ratios = []
    for start in range(len(auto) - count + 1):
        ours, theirs = (sum(rates[start : start + count]) for rates in (auto, off))
        if theirs > 0:
            ratios.append(ours / theirs)
    return round(min(ratios), 3) if ratios else None


def worst_span(schedule: Schedule, measured: dict[str, Row]) -> float | None:
    """``sliding_minimum`` over ``SPAN`` seconds; None: an engine is missing."""
    if not {"off", "auto"} <= measured.keys():
        return None
    rates = {
        name: [window["tok_s"] for window in run["windows"]]
        for name, run in measured.items()
    }
    count = max(round(SPAN / schedule.window), 1)
    return sliding_minimum(rates["auto"], rates["off"], count)


def make_rows(schedule: Schedule, measured: dict[str, Row]) -> list[Row]:
    """One row a window, with the numbers of every engine measured."""
    rows = []
    for window in range(schedule.num_windows):
        row: Row = {
            "second": round(window * schedule.window, 3),
            "stage": schedule.stage_of(window),
            "concurrency": schedule.concurrency_of(window),
            "text": schedule.text_of(window),
        }
        for name, run in measured.items():
            row |= {f"{name}_{k}": v for k, v in run["windows"][window].items()}
        if row.get("off_tok_s") and "auto_tok_s" in row:
            row["auto_over_off"] = round(row["auto_tok_s"] / row["off_tok_s"], 3)
        rows.append(row)
    return rows


def make_stages(schedule: Schedule, changes: Sequence[float]) -> list[Row]:
    """How soon the choice came to rest in every stage, and in its halves."""
    stages = []
    for stage, concurrency in enumerate(schedule.concurrency):
        easy, hard = (
            schedule.settle_seconds(changes, half)
            for half in (2 * stage, 2 * stage + 1)
        )
        # Where the second half has a change, it is the stage's last.
        total = schedule.stage_seconds / 2 + hard if hard else easy
        stages.append(
            {
                "stage": stage,
                "concurrency": concurrency,
                "seconds_to_settle": round(total, 2),
                "easy_seconds_to_settle": round(easy, 2),
                "hard_seconds_to_settle": round(hard, 2),
            }
        )
    return stages
