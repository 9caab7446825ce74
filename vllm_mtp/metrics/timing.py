"""Times of the phases of a pass, without ever waiting for the device."""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from vllm_mtp.metrics.counts import PHASES

MAX_PENDING = 64
"""Passes whose events may be outstanding; older ones are given up."""


class PhaseTimer:
    """Marks the phases of each pass: CUDA events on a GPU, the clock on a CPU.

    ``begin`` opens a pass, ``mark(phase)`` closes a phase that began at the mark
    before. On a GPU times are those of the stream, so idle time of the device that
    lies between two marks belongs to the phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._now = _cuda_event if device.type == "cuda" else _ClockEvent
        self._marks: list[tuple[str, Any]] = []
        self._pending: deque[tuple[str, Any, Any]] = deque(
            maxlen=MAX_PENDING * len(PHASES)
        )
        self._last: dict[str, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Open a pass; marks of one that was left open are dropped."""
        self._marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """Close ``phase``; without an open pass nothing happens."""
        if not self._marks:
            return
        start, end = self._marks[-1][1], self._now()
        self._marks.append((phase, end))
        self._last[phase] = (start, end)
        self._pending.append((phase, start, end))

    def end(self) -> None:
        """Close the pass; marks outside of one are no phases."""
        self._marks = []

    def last_ms(self, phase: str) -> Callable[[], float | None]:
        """A function for the time of the newest phase of this name.

        Call it when the device is known to be past the phase.
        """
        found = self._last.get(phase)
        if found is None:
            return lambda: None
        start, end = found
        return lambda: float(round(start.elapsed_time(end), 4))

    def take_us(self) -> dict[str, int]:
        """Whole microseconds by phase of what is complete and not taken yet."""
        found: Counter[str] = Counter()
        while self._pending and self._pending[0][2].query():
            phase, start, end = self._pending.popleft()
            found[phase] += round(1000 * start.elapsed_time(end))
        return dict(found)


class _ClockEvent:
    """A moment of the host's clock, with the methods of a CUDA event."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_ClockEvent") -> float:
        """Milliseconds until ``end``."""
        return 1000 * (end._time - self._time)


def _cuda_event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
