"""Milliseconds of a decode step: measured at start-up, corrected while serving."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mtp.auto.ladder import Rung

Vector = npt.NDArray[np.float64]

VERSION = 6
"""Of the cache file."""

MEMORY = 32.0
"""Steps of a rung that are counted."""


@dataclass(frozen=True)
class Trust:
    """How far a table is right; logarithms, as standard deviations."""

    ratio: float
    """One rung against the others."""

    common: float
    """All rungs alike, at first."""

    moved: float
    """What a batch of e times the size, or an e-th of it, adds to that."""

    away: float
    """What that takes from a ratio, which was seen elsewhere."""


MEASURED = Trust(ratio=0.04, common=0.3, moved=0.2, away=0.3)
TYPICAL = Trust(ratio=0.3, common=2.0, moved=0.5, away=1.0)

MOVED = 0.4
"""Such a change of the batch's logarithm that typical costs count as unknown again."""

COMMON_DRIFT = 0.01
"""How far all rungs' costs change from one step to the next."""

STEP_NOISE = 0.02
"""How much steps that should take as long differ."""

OUTLIER = 3.5
"""Standard deviations that one step counts for at most."""

KEEP = 0.9998
"""Of a ratio at each step."""


class CostCacheError(ValueError):
    """A cost file that cannot be used; the message says why."""


class NoCostFileError(CostCacheError):
    """There is none."""


@dataclass(frozen=True)
class CostTable:
    """Step times over rung, batch and context."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    # [rung][context][batch]
    times: tuple[tuple[tuple[float, ...], ...], ...]

    def predict(self, rung: int, batch: int, context: int) -> float:
        """Milliseconds, interpolated; beyond the last points along the last slope."""
        rows = self.times[rung]
        by_context = [interpolate(self.batches, row, batch) for row in rows]
        return max(interpolate(self.contexts, by_context, context), 1e-3)

    def to_json(self, key: str, ladder: Sequence[Rung]) -> str:
        """The cache file's text."""
        return json.dumps(
            {
                "version": VERSION,
                "key": key,
                "rungs": _names(ladder),
                "batches": self.batches,
                "contexts": self.contexts,
                "times_ms": self.times,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str, key: str, ladder: Sequence[Rung]) -> "CostTable":
        """Inverse of ``to_json``.

        Raises:
            CostCacheError: not such a file, or made for something else.
        """
        try:
            found: Any = json.loads(text)
            if found["version"] != VERSION or found["key"] != key:
                raise CostCacheError("it was made for another model, GPU or setting")
            if found["rungs"] != _names(ladder):
                raise CostCacheError("it was made for other tree sizes")
            table = cls(
                tuple(int(b) for b in found["batches"]),
                tuple(int(c) for c in found["contexts"]),
                tuple(
                    tuple(tuple(float(t) for t in row) for row in rows)
                    for rows in found["times_ms"]
                ),
            )
        except CostCacheError:
            raise
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise CostCacheError(f"it is no cost file ({error!r})") from error
        except RecursionError as error:
            raise CostCacheError("it is no cost file (nested too deep)") from error
        sizes = {(len(rows), *map(len, rows)) for rows in table.times}
        wanted = {(len(table.contexts), *[len(table.batches)] * len(table.contexts))}
        times = [t for rows in table.times for row in rows for t in row]
        usable = all(0 < t < math.inf for t in times)
        usable = usable and _is_axis(table.batches) and _is_axis(table.contexts)
        if len(table.times) != len(ladder) or sizes != wanted or not usable:
            raise CostCacheError("its table is incomplete or holds impossible numbers")
        return table

    @classmethod
    def load(cls, path: Path, key: str, ladder: Sequence[Rung]) -> "CostTable":
        """Read a cache file.

        Raises:
            CostCacheError: unreadable, damaged, or made for something else.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise NoCostFileError("it is not there") from error
        except (OSError, UnicodeDecodeError) as error:
            raise CostCacheError(f"it cannot be read ({error})") from error
        return cls.from_json(text, key, ladder)


def _names(ladder: Sequence[Rung]) -> list[list[int]]:
    return [[r.num_nodes, r.num_steps, r.num_drafts, r.frontier] for r in ladder]


def _is_axis(points: Sequence[int]) -> bool:
    """Whether there are points, positive and rising."""
    rising = all(a < b for a, b in itertools.pairwise(points))
    return len(points) > 0 and points[0] > 0 and rising


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear; beyond the last point the last slope goes on.

    Args:
        xs: Rising.
        ys: One for each of ``xs``; they rise as costs do, so slopes below 0 count as 0.
        x: Where.
    """
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    high = next((i for i, known in enumerate(xs) if x <= known), len(xs) - 1)
    low = high - 1
    slope = (ys[high] - ys[low]) / (xs[high] - xs[low])
    return float(ys[low] + max(slope, 0.0) * (x - xs[low]))


def default_table(ladder: Sequence[Rung]) -> CostTable:
    """Stand-in where nothing was measured: a step costs little more for more rows.

    Round figures, shaped like a large MoE; online corrections do the rest.
    """
    batches = (1, 8, 64, 256)
    base = {1: 1.0, 8: 1.6, 64: 3.0, 256: 4.5}

    def cost(rung: Rung, batch: int) -> float:
        growth = 1 + 0.11 * float(rung.num_nodes**0.8)
        return 10 * base[batch] * growth + 0.8 * rung.num_steps

    return CostTable(
        batches,
        (1024,),
        tuple((tuple(cost(rung, b) for b in batches),) for rung in ladder),
    )


class CostModel:
    """The table and what serving has shown to be wrong with it.

    What is wrong with all rungs alike (``common``) changes with the batch and the
    context and says nothing about which rung to take. What is wrong with one rung
    against the others (``ratios``) stays. One rung alone cannot tell the two apart, so
    a Kalman filter of their logarithms keeps how far each is known.
    """

    def __init__(self, table: CostTable, num_rungs: int, is_measured: bool) -> None:
        self.table, self.is_measured = table, is_measured
        self.trust = trust = MEASURED if is_measured else TYPICAL
        # Logarithms of common, then of the ratios, and their covariance.
        self.state = np.zeros(1 + num_rungs)
        self.covariance = np.diag([trust.common**2] + [trust.ratio**2] * num_rungs)
        # Steps timed lately, by rung.
        self.weights = [0.0] * num_rungs
        self.batch = 0
        # What a step keeps and adds while the batch stays as it is.
        self.steady = self._ageing(0.0)

    @property
    def common(self) -> float:
        """Factor on all rungs."""
        return math.exp(self.state[0])

    @property
    def ratios(self) -> list[float]:
        """Factor on each rung."""
        return [math.exp(value) for value in self.state[1:]]

    def predict(self, rung: int, batch: int, context: int) -> float:
        """Milliseconds of a step in which nothing but decoding happens."""
        base = self.table.predict(rung, batch, context)
        return base * math.exp(self.state[0] + self.state[1 + rung])

    def observe(self, rung: int, batch: int, context: int, ms: float) -> None:
        """Take in the time of one step; one that no clock should give is left out."""
        if not 0 < ms < math.inf:
            return
        self._grow_old(batch)
        covariance = self.covariance
        seen: Vector = covariance[0] + covariance[1 + rung]
        variance = float(seen[0] + seen[1 + rung]) + STEP_NOISE**2
        off_by = math.log(ms / self.predict(rung, batch, context))
        # One slow step (a pause, another program) must not count for many.
        limit = OUTLIER * math.sqrt(variance)
        off_by = min(max(off_by, -limit), limit)
        gain = seen / variance
        self.state += gain * off_by
        covariance -= gain[:, None] * seen
        self.weights[rung] = min(self.weights[rung] + 1, MEMORY)
        for other in range(len(self.weights)):
            if other != rung:
                # Forgets slowly: batch and context move on.
                self.weights[other] *= 0.9995

    def _grow_old(self, batch: int) -> None:
        """Trust what is known less, and the table more, in the next step."""
        ageing = self.steady
        if batch != self.batch:
            moved = abs(math.log(batch / self.batch)) if self.batch else 0.0
            if not self.is_measured and moved > MOVED:
                self.weights = [min(weight, 1.0) for weight in self.weights]
            ageing = self._ageing(min(moved, 1.0))
            self.batch = batch
        keep, added = ageing
        self.state *= keep
        self.covariance *= keep
        self.covariance *= keep[:, None]
        self.covariance.ravel()[:: len(keep) + 1] += added

    def _ageing(self, moved: float) -> tuple[Vector, Vector]:
        """Factors of the state, and what its variances grow by.

        Args:
            moved: Change of the batch's logarithm, at most 1.
        """
        trust = self.trust
        kept = KEEP * math.exp(-trust.away * moved)
        keep = np.full_like(self.state, kept)
        added = np.full_like(self.state, (1 - kept**2) * trust.ratio**2)
        keep[0] = 1.0
        added[0] = COMMON_DRIFT**2 + (trust.moved * moved) ** 2
        return keep, added
