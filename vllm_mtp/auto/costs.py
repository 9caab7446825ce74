"""Milliseconds of a decode step: measured at start-up, corrected while serving."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtp.auto.ladder import Rung

VERSION = 1
"""Of the cache file."""

MEMORY = 32.0
"""Steps that a correction remembers (exponentially)."""


class CostCacheError(ValueError):
    """A cost file that cannot be used; the message says why."""


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
                "rungs": [[r.num_nodes, r.num_steps] for r in ladder],
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
            if found["rungs"] != [[r.num_nodes, r.num_steps] for r in ladder]:
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
        except (OSError, UnicodeDecodeError) as error:
            raise CostCacheError(f"it cannot be read ({error})") from error
        return cls.from_json(text, key, ladder)


def _is_axis(points: Sequence[int]) -> bool:
    """Whether there are points, positive and rising."""
    rising = all(a < b for a, b in itertools.pairwise(points))
    return len(points) > 0 and points[0] > 0 and rising


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear and, as costs are, never falling; the last slope goes on."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    high = next((i for i, known in enumerate(xs) if x <= known), len(xs) - 1)
    low = high - 1
    slope = max(ys[high] - ys[low], 0.0) / (xs[high] - xs[low])
    return float(ys[low] + slope * (x - xs[low]))


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
    """The table and what serving has shown to be wrong with it."""

    def __init__(self, table: CostTable, num_rungs: int, is_measured: bool) -> None:
        self.table, self.is_measured = table, is_measured
        # Measured / predicted of each rung, and how many steps stand behind it.
        self.ratios = [1.0] * num_rungs
        self.weights = [0.0] * num_rungs

    def predict(self, rung: int, batch: int, context: int) -> float:
        """Milliseconds of a step in which nothing but decoding happens."""
        # A rung not seen lately is as wrong as the others are on average.
        total = sum(self.weights)
        shared = 1.0
        if total > 0:
            pairs = zip(self.ratios, self.weights, strict=True)
            shared = sum(r * w for r, w in pairs) / total
        trust = self.weights[rung] / (self.weights[rung] + 1.0)
        ratio: float = trust * self.ratios[rung] + (1 - trust) * shared
        return self.table.predict(rung, batch, context) * ratio

    def observe(self, rung: int, batch: int, context: int, ms: float) -> None:
        """Take in the time of one step."""
        ratio = ms / self.table.predict(rung, batch, context)
        weight = self.weights[rung]
        known = self.ratios[rung]
        if weight >= 8:
            # One slow step (a pause, another program) must not count for many.
            ratio = min(max(ratio, 0.7 * known), 1.5 * known)
        weight = min(weight, MEMORY - 1)
        self.ratios[rung] = (known * weight + ratio) / (weight + 1)
        self.weights[rung] = weight + 1
        for other in range(len(self.weights)):
            if other != rung:
                # Forgets slowly: batch and context move on.
                self.weights[other] *= 0.9995
