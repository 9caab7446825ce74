"""How far the text model of ``"shape": "auto"`` holds on rows of ``frontier.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mtp.auto.acceptance import expected_nodes
from vllm_mtp.auto.ladder import build_ladder
from vllm_mtp.config import METHOD, parse_settings

TEXTS = [p / 500 for p in range(50, 490)]


def by_size(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[float, int, int, int], float]:
    """Temperature, N, S and F -> accept length."""
    names = ("temperature", "nodes", "depth", "frontier")
    return {tuple(row[n] for n in names): row["accept_length"] for row in rows}


def model_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How wrong ``auto/acceptance.py`` is about these rows, relatively.

    From what one size of ``"shape": "auto"`` accepts it tells what every other does;
    an error for each pair of sizes of three nodes and more, and each temperature.
    """
    found = by_size(rows)
    largest = parse_settings({"method": METHOD}).config.shape
    sizes = [rung for rung in build_ladder(largest) if rung.num_nodes >= 3]
    told = {
        (r, p): 1 + expected_nodes(r, largest.topk, p) for r in sizes for p in TEXTS
    }
    errors: list[float] = []
    for temperature in sorted({temperature for temperature, *_ in found}):
        seen = {r: found[temperature, r.num_nodes, *r.levels] for r in sizes}
        for source in sizes:
            text = min(TEXTS, key=lambda p: abs(told[source, p] - seen[source]))
            errors += [told[r, text] / seen[r] - 1 for r in sizes if r != source]
    return errors
