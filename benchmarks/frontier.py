"""Accept length by nodes, depth and frontier: what expanding more nodes is worth.

    python -m benchmarks.frontier --out benchmarks/results/frontier.json

Trees of the tiny model are traced once with every candidate verified. From each trace
smaller trees are cut as they would have been drafted: at every depth the F best nodes
are expanded, and of all candidates the N best are kept. What they accept is read off
the trace. A row: ``temperature``, ``nodes`` (N), ``depth`` (S), ``frontier`` (F),
``accept_length``.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.common import write_record
from benchmarks.traces import count_accepted, parse_args, trace_trees
from vllm_mtp.config import candidates
from vllm_mtp.trace.schema import Step

TOPK, DEPTH = 3, 6
SHAPE = (DEPTH, TOPK, candidates(DEPTH, TOPK, TOPK))
NODES = (2, 3, 4, 5, 7, 8, 12, 15)


def draft(step: Step, depth: int, frontier: int) -> list[int]:
    """Rows of the candidates that a narrower tree would have, best first."""
    score = {row: s for row, s in enumerate(step.scores) if s is not None}
    found: list[int] = []
    expanded = {0}
    for level in range(1, depth + 1):
        children = [
            row
            for row in score
            if step.depths[row] == level and step.parents[row] in expanded
        ]
        # Rows are in order of their scores, ties too.
        found += children
        expanded = set(children[:frontier])
    return sorted(found)


def measure(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """A row for each size that has so many candidates."""
    rows = []
    for depth in range(1, DEPTH + 1):
        for frontier in range(1, TOPK + 1):
            if depth == 1 and frontier > 1:
                continue
            drafted = [draft(step, depth, frontier) for step in steps]
            for nodes in NODES:
                if not depth <= nodes <= candidates(depth, TOPK, frontier):
                    continue
                pairs = zip(steps, drafted, strict=True)
                total = sum(count_accepted(s, set(best[:nodes])) for s, best in pairs)
                rows.append(
                    {
                        "nodes": nodes,
                        "depth": depth,
                        "frontier": frontier,
                        "accept_length": round(1 + total / len(steps), 3),
                    }
                )
    return rows


def main() -> None:
    out, temperatures = parse_args(__doc__)
    rows: list[dict[str, Any]] = []
    for temperature in temperatures:
        steps = trace_trees(SHAPE, temperature)
        rows += [{"temperature": temperature, **row} for row in measure(steps)]
        write_record(out, rows, shape=SHAPE, trees=len(steps))
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
