"""How true are the scores: predicted against observed acceptance, by depth.

    python -m benchmarks.calibration --out benchmarks/results/calibration.json

A node's score is the estimated chance that the target draws it after its parent; along
a path these multiply. Trees of the tiny model are traced, and for every drafted child
of a row on the accepted path it is noted what was predicted and whether the target drew
it. A row: ``temperature``, ``depth``, ``nodes``, ``predicted`` and ``observed`` (means
over the nodes of the bin), ``low`` and ``high`` (the bin).
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from benchmarks.common import write_record
from benchmarks.traces import parse_args, trace_trees
from vllm_mtp.trace.schema import Step

SHAPE = (5, 8, 32)
BINS = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 1.0)


def children_on_path(step: Step) -> Iterator[tuple[int, float, bool]]:
    """Depth, predicted chance and outcome of every child of an accepted row."""
    accepted = set(step.path)
    for row in range(1, len(step.parents)):
        parent, score = step.parents[row], step.scores[row]
        if parent not in accepted or score is None:
            continue
        above = step.scores[parent] if parent else 0.0
        assert above is not None
        drawn = step.tokens[row] == step.drawn[parent]
        yield step.depths[row], math.exp(score - above), drawn


def tabulate(steps: Iterable[Step], temperature: float) -> list[dict[str, Any]]:
    """The reliability table of one temperature."""
    found = [node for step in steps for node in children_on_path(step)]
    rows = []
    for depth in range(1, SHAPE[0] + 1):
        for low, high in pairwise(BINS):
            last = high == BINS[-1]
            nodes = [
                (predicted, drawn)
                for at, predicted, drawn in found
                if at == depth and low <= predicted and (predicted < high or last)
            ]
            if not nodes:
                continue
            rows.append(
                {
                    "temperature": temperature,
                    "depth": depth,
                    "low": low,
                    "high": high,
                    "nodes": len(nodes),
                    "predicted": round(sum(p for p, _ in nodes) / len(nodes), 3),
                    "observed": round(sum(d for _, d in nodes) / len(nodes), 3),
                }
            )
    return rows


def main() -> None:
    out, temperatures = parse_args(__doc__)
    rows: list[dict[str, Any]] = []
    for temperature in temperatures:
        rows += tabulate(trace_trees(SHAPE, temperature), temperature)
        write_record(out, rows, shape=SHAPE)
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
