"""Milliseconds of a decode step: measured at start-up, corrected while serving."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtp.auto.ladder import Rung

VERSION = 4
"""Of the cache file."""

COMMON_MEMORY, MEMORY = 8.0, 32.0
"""Steps that the corrections remember, that of all rungs and that of each."""


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


def interpolate(
    xs: Sequence[float], ys: Sequence[float], x: float, *, rising: bool = True
) -> float:
    """Piecewise linear; beyond the last point the last slope goes on.

    Args:
        xs: Rising.
        ys: One for each of ``xs``.
        x: Where.
        rising: As costs are: slopes below 0 count as 0. Otherwise the value is that of
            the nearest end outside of ``xs``.
    """
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    if not rising and x >= xs[-1]:
        return ys[-1]
    high = next((i for i, known in enumerate(xs) if x <= known), len(xs) - 1)
    low = high - 1
    slope = (ys[high] - ys[low]) / (xs[high] - xs[low])
    return float(ys[low] + (max(slope, 0.0) if rising else slope) * (x - xs[low]))


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

    What is wrong with all rungs alike (``common``) follows the last steps; it changes
    with the batch and the context and says nothing about which rung to take. What is
    wrong with one rung against the others (``ratios``) is kept for longer.
    """

    def __init__(self, table: CostTable, num_rungs: int, is_measured: bool) -> None:
        self.table, self.is_measured = table, is_measured
        self.common, self.common_weight = 1.0, 0.0
        # By rung, and how many steps stand behind it.
        self.ratios = [1.0] * num_rungs
        self.weights = [0.0] * num_rungs
        # Steps that the table itself is worth.
        self.prior = 2.0 if is_measured else 1.0
        self.batch = 0

    def predict(self, rung: int, batch: int, context: int) -> float:
        """Milliseconds of a step in which nothing but decoding happens."""
        base = self.table.predict(rung, batch, context)
        return base * self.common * self._ratio(rung)

    def _ratio(self, rung: int) -> float:
        """Of a rung that was not timed lately, that of those that were.

        Else the error that these share would count against it, and it would never be
        timed. Measured costs are right about it as they are.
        """
        known, total = min(self.weights[rung], 1.0), sum(self.weights)
        if self.is_measured or known == 1 or total == 0:
            return self.ratios[rung]
        pairs = zip(self.weights, self.ratios, strict=True)
        mean = math.exp(sum(w * math.log(ratio) for w, ratio in pairs) / total)
        return math.pow(self.ratios[rung], known) * math.pow(mean, 1 - known)

    def observe(self, rung: int, batch: int, context: int, ms: float) -> None:
        """Take in the time of one step; one that no clock should give is left out."""
        if not 0 < ms < math.inf:
            return
        off_by = ms / self.predict(rung, batch, context)
        if not 0.67 < batch / max(self.batch, 1) < 1.5:
            self.batch, self.common_weight = batch, min(self.common_weight, 1.0)
            if not self.is_measured:
                # Typical costs are wrong in another way at another batch.
                self.weights = [min(weight, 1.0) for weight in self.weights]
        if min(self.common_weight, self.weights[rung]) >= COMMON_MEMORY / 2:
            # One slow step (a pause, another program) must not count for many.
            off_by = min(max(off_by, 0.7), 1.5)
        # Which of the two is wrong? The one that is known less.
        doubt = 4 / (self.common_weight + 1) ** 2, 1 / (self.weights[rung] + 2)
        share = doubt[0] / (doubt[0] + doubt[1])
        self.common *= off_by ** (share / (self.common_weight + 1))
        weight = self.weights[rung] + self.prior
        self.ratios[rung] = self._ratio(rung) * off_by ** ((1 - share) / weight)
        self.common_weight = min(self.common_weight + 1, COMMON_MEMORY)
        self.weights[rung] = min(self.weights[rung] + 1, MEMORY)
        for other in range(len(self.weights)):
            if other != rung:
                # Forgets slowly: batch and context move on.
                self.weights[other] *= 0.9995
