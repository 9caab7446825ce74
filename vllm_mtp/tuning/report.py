"""What to make of the measurements: best per batch, one setting for all, a plot."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from vllm_mtp.tuning.shapes import Shape

Row = dict[str, Any]

AUTO_LEVEL = 0.98
"""``auto`` and ``auto:shared`` are recommended when the better of them reaches this
share of the best fixed shape."""

BAR = 32
"""Characters of the longest bar."""


def rates_of(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Tokens per second by shape and batch."""
    rates: dict[str, dict[int, float]] = {}
    for row in rows:
        rates.setdefault(row["shape"], {})[row["batch"]] = row["tok_s"]
    return rates


def recommend(rows: Sequence[Row], configs: dict[str, Any]) -> Row:
    """One configuration for all batches measured.

    Args:
        rows: As ``tuning.run.measure`` makes them.
        configs: ``--speculative-config`` by shape; None is no speculation.

    Returns:
        ``shape``, ``speculative_config`` (None: leave speculation off), ``why``, and
        ``best`` by batch. The mean over batches is geometric.
    """
    rates = rates_of(rows)
    batches = sorted(set.intersection(*(set(found) for found in rates.values())))
    means = {
        shape: statistics.geometric_mean(max(found[b], 1e-3) for b in batches)
        for shape, found in rates.items()
    }
    autos = [shape for shape in means if Shape.parse(shape).is_auto]
    fixed = [shape for shape in means if shape not in autos]
    chosen = max(fixed or means, key=lambda shape: means[shape])
    why = "the most tokens per second over all batches (geometric mean)"
    auto = max(autos, key=lambda shape: means[shape], default=chosen)
    if fixed and auto != chosen and means[auto] >= AUTO_LEVEL * means[chosen]:
        ratio = means[auto] / means[chosen]
        why = f"{ratio:.2f}x the best fixed shape ({chosen}) over all batches"
        chosen = auto
    return {
        "shape": chosen,
        "speculative_config": configs[chosen],
        "why": why,
        "best": {b: max(rates, key=lambda shape: rates[shape][b]) for b in batches},
    }


def plot(rows: Sequence[Row]) -> str:
    """Bars of tokens per second, batch by batch, each against its best."""
    rates = rates_of(rows)
    width = max(map(len, rates))
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        found = {s: r[batch] for s, r in rates.items() if batch in r}
        best = max(found.values())
        lines.append(f"batch {batch}")
        for shape, rate in sorted(found.items(), key=lambda pair: -pair[1]):
            bar = "#" * max(round(BAR * rate / best), 1)
            lines.append(f"  {shape:<{width}} {bar:<{BAR}} {rate:,.0f} tok/s")
    return "\n".join(lines)


def config_text(config: Row | None) -> str:
    """The option as it is typed."""
    if config is None:
        return "(no --speculative-config: speculation does not pay here)"
    return f"--speculative-config '{json.dumps(config)}'"
