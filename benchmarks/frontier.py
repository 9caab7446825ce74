"""Accept length by nodes, depth and frontier: what expanding more nodes is worth.

    python -m benchmarks.frontier --out benchmarks/results/frontier.json

Trees of the tiny model are traced once with every candidate verified. From each trace
smaller trees are cut as they would have been drafted: at every depth the F best nodes
are expanded, and of all candidates the N best are kept. What they accept is read off
the trace. A row: ``temperature``, ``nodes`` (N), ``depth`` (S), ``frontier`` (F),
``accept_length``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import write_record
from benchmarks.traces import parse_args, trace_trees
from vllm_mtp.auto.acceptance import expected_nodes
from vllm_mtp.auto.ladder import build_ladder
from vllm_mtp.config import METHOD, candidates, parse_settings
from vllm_mtp.trace.schema import Step

TOPK, DEPTH = 3, 6
SHAPE = (DEPTH, TOPK, candidates(DEPTH, TOPK, TOPK))
NODES = (2, 3, 4, 5, 7, 8, 12, 15)
TEXTS = [p / 500 for p in range(50, 490)]


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


def accepted(step: Step, kept: set[int]) -> int:
    """Nodes of the accepted path up to the first that was not kept."""
    path = [row in kept for row in step.path[1:]]
    return [*path, False].index(False)


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
                total = sum(accepted(s, set(rows_[:nodes])) for s, rows_ in pairs)
                rows.append(
                    {
                        "nodes": nodes,
                        "depth": depth,
                        "frontier": frontier,
                        "accept_length": round(1 + total / len(steps), 3),
                    }
                )
    return rows


def model_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How wrong ``auto/acceptance.py`` is about these rows, relatively.

    From what one size of ``"shape": "auto"`` accepts it tells what every other does;
    an error for each pair of sizes of three nodes and more, and each temperature.
    """
    found = {
        (r["temperature"], r["nodes"], r["depth"], r["frontier"]): r["accept_length"]
        for r in rows
    }
    ladder = build_ladder(parse_settings({"method": METHOD}).config.shape)
    sizes = [rung for rung in ladder if rung.num_nodes >= 3]
    told = {(r, p): 1 + expected_nodes(r, TOPK, p) for r in sizes for p in TEXTS}
    errors: list[float] = []
    for temperature in sorted({temperature for temperature, *_ in found}):
        seen = {r: found[temperature, r.num_nodes, *r.levels] for r in sizes}
        for source in sizes:
            text = min(TEXTS, key=lambda p: abs(told[source, p] - seen[source]))
            errors += [told[r, text] / seen[r] - 1 for r in sizes if r != source]
    return errors


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
