"""From answers and the server's counters to a row per concurrency."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm_mtp.bench.client import Round

PERCENTILES = (50, 90, 99)

_SAMPLE = re.compile(
    r"^vllm:(?P<name>\w+?)_total(?:\{(?P<labels>.*)\})? (?P<value>\S+)$"
)
_LABEL = re.compile(r'(?:^|,)(?:nodes|reason|position)="(\w+)"')


def read_counters(page: str) -> Counter[str]:
    """Speculation's totals of a Prometheus page, as ``name`` or ``name/label``.

    Engines and models are added up.
    """
    found: Counter[str] = Counter()
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if not match or not match["name"].startswith(("spec_decode", "mtp_tree")):
            continue
        key = "/".join([match["name"], *_LABEL.findall(match["labels"] or "")])
        found[key] += int(float(match["value"]))
    return found


def make_row(
    result: Round, before: Counter[str], after: Counter[str]
) -> dict[str, Any]:
    """The figures of a concurrency; what is not known is None."""
    good = [a for a in result.answers if a.error is None]
    tokens = sum(a.tokens for a in good)
    return {
        "concurrency": result.concurrency,
        "requests": len(result.answers),
        "failed": len(result.answers) - len(good),
        "seconds": round(result.seconds, 3),
        "output_tokens": tokens,
        "tokens_per_s": round(tokens / result.seconds, 2) if result.seconds else None,
        "ttft_ms": spread([a.ttft_ms for a in good]),
        "tpot_ms": spread([a.tpot_ms for a in good]),
        **speculation(after - before),
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and percentiles (nearest rank); None of nothing."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    found = {"mean": round(sum(known) / len(known), 3)}
    for p in PERCENTILES:
        rank = max(math.ceil(p / 100 * len(known)), 1)
        found[f"p{p}"] = round(known[rank - 1], 3)
    return found


def speculation(counts: Counter[str]) -> dict[str, Any]:
    """Accept length and what it comes from; None where nothing was drafted."""
    drafts = counts["spec_decode_num_drafts"]
    accepted = counts["spec_decode_num_accepted_tokens"]
    per_depth = _by_label(counts, "spec_decode_num_accepted_tokens_per_pos")
    nodes = counts["mtp_tree_nodes_verified"] or counts["spec_decode_num_draft_tokens"]
    return {
        "accept_length": round(1 + accepted / drafts, 4) if drafts else None,
        "accepted_per_depth": [
            round(per_depth[depth] / drafts, 4) for depth in sorted(per_depth)
        ],
        "nodes_per_step": round(nodes / drafts, 2) if drafts else None,
        "passes_by_nodes": {
            str(width): count
            for width, count in sorted(_by_label(counts, "mtp_tree_passes").items())
        },
    }


def _by_label(counts: Counter[str], name: str) -> dict[int, int]:
    prefix = name + "/"
    return {
        int(key.removeprefix(prefix)): count
        for key, count in counts.items()
        if key.startswith(prefix)
    }
