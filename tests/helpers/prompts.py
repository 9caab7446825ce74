"""Held-out prompts of the tiny model, cut to mixed lengths."""

import json
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parents[2] / "examples" / "tiny_deepseek" / "prompts.json"


def held_out(count: int, lengths: tuple[int, ...] | None = None) -> list[list[int]]:
    """The first ``count`` held-out prompts as token ids, cut to ``lengths`` in turn."""
    entries: list[dict[str, Any]] = json.loads(PROMPTS.read_text())
    prompts = [list(e["token_ids"]) for e in entries[:count]]
    if lengths is None:
        return prompts
    return [p[: lengths[i % len(lengths)]] for i, p in enumerate(prompts)]
