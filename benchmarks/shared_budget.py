"""What one node budget for the whole batch would accept, against equal trees.

    python -m benchmarks.shared_budget --out benchmarks/results/shared_budget.json

Trees of the tiny model are traced once, 15 nodes each. Batches are drawn from them, and
either every tree keeps its N best nodes or the batch keeps its best ``batch * N``, at
most 15 a tree. Nodes are in order of their scores, so a tree keeps a front of its rows
either way, and what it accepts is read off the trace. A row: ``temperature``,
``batch``, ``nodes`` (N), ``equal`` and ``shared`` (accept lengths), ``gain``.
"""

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.common import write_record
from benchmarks.traces import count_accepted, parse_args, trace_trees
from vllm_mtp.trace.schema import Step

SHAPE = (6, 3, 15)
BATCHES = (8, 32, 128)
NODES = (1, 2, 3, 5, 7)
TREES = 16384
"""Trees drawn for each row of the table."""


def accepted(step: Step, kept: int) -> int:
    """Nodes of the accepted path that lie among the first ``kept``."""
    return count_accepted(step, range(1, kept + 1))


def share(batch: Sequence[Step], budget: int) -> list[int]:
    """Nodes that each tree keeps if the best of all are kept."""
    scored = [
        (score, index)
        for index, step in enumerate(batch)
        for score in step.scores[1:]
        if score is not None
    ]
    kept = [0] * len(batch)
    for _, index in sorted(scored, reverse=True)[:budget]:
        kept[index] += 1
    return kept


def compare(steps: Sequence[Step], batch: int, nodes: int) -> dict[str, Any]:
    """Accept lengths of equal trees and of a shared budget."""
    rng = random.Random(nodes)
    equal = shared = 0
    rounds = TREES // batch
    for _ in range(rounds):
        drawn = [rng.choice(steps) for _ in range(batch)]
        equal += sum(accepted(step, nodes) for step in drawn)
        kept = share(drawn, batch * nodes)
        shared += sum(map(accepted, drawn, kept))
    count = rounds * batch
    return {
        "batch": batch,
        "nodes": nodes,
        "equal": round(1 + equal / count, 3),
        "shared": round(1 + shared / count, 3),
        "gain": round((count + shared) / (count + equal), 3),
    }


def main() -> None:
    out, temperatures = parse_args(__doc__)
    rows: list[dict[str, Any]] = []
    for temperature in temperatures:
        steps = trace_trees(SHAPE, temperature)
        rows += [
            {"temperature": temperature, **compare(steps, batch, nodes)}
            for batch in BATCHES
            for nodes in NODES
        ]
        write_record(out, rows, shape=SHAPE, trees=len(steps))
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
