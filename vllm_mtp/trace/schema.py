"""What a trace file holds.

A trace is JSON lines: one header, then one line per verify step and request, each with
a ``kind``:

* ``header``  schema version, run id, model, settings, versions
* ``step``    one request's tree in one verify pass, and what came of it
* ``prompt``  the prompt of a request; only if ``prompt_text`` was asked for
* ``dropped`` steps that were not written because the writer's queue was full
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_mtp.tree.layout import NO_PARENT

SCHEMA_VERSION = 1
"""Goes up when a reader of the old version could no longer read the file."""


@dataclass(frozen=True)
class Header:
    """The first line of a trace."""

    run: str
    """Random id of the traced process; the parts of a rotated trace share it."""

    created: float
    """Unix time in seconds."""

    model: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Step:
    """One request's tree in one verify pass. Row 0 is the root; see tree/layout.py."""

    request: str
    step: int
    """Number of the verify pass in this worker."""

    time: float
    """Unix time in seconds at which the pass was recorded."""

    batch: int
    """Requests in the pass."""

    position: int
    """Sequence position of the root; a row stands at ``position + depth``."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float | None, ...]
    """Cumulative log-probability of acceptance; None for padding rows."""

    drawn: tuple[int, ...]
    """The token the target's sampler drew at each row."""

    path: tuple[int, ...]
    """Accepted rows, root first."""

    draft_ms: float | None = None
    verify_ms: float | None = None
    texts: Mapping[int, str] = field(default_factory=dict)
    """Text of the token ids above; empty unless text was asked for."""

    @property
    def emitted(self) -> tuple[int, ...]:
        """Tokens the step produced: the draws along the accepted path."""
        return tuple(self.drawn[row] for row in self.path)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes verified; the root and padding rows are not counted."""
        return sum(parent != NO_PARENT for parent in self.parents[1:])

    @property
    def num_accepted(self) -> int:
        """Drafted nodes accepted, which is one less than the tokens emitted."""
        return len(self.path) - 1

    def text(self, token: int) -> str | None:
        """Text of a token, or None when the trace holds no text for it."""
        return self.texts.get(token)


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request."""

    request: str
    tokens: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class Trace:
    """A loaded trace."""

    header: Header
    steps: tuple[Step, ...]
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    dropped: int = 0
    """Steps that were sampled but not written because the disk was too slow."""

    notes: tuple[str, ...] = ()
    """What a reader should know, for example that the last line is cut off."""

    @property
    def requests(self) -> tuple[str, ...]:
        """Request ids in order of appearance."""
        return tuple(dict.fromkeys(step.request for step in self.steps))


def header_to_json(header: Header) -> str:
    """The header as one line, without the newline."""
    return dump_line({"kind": "header", **asdict(header)})


def step_to_json(step: Step) -> str:
    """The step as one line, without the newline."""
    record: dict[str, Any] = {"kind": "step", **asdict(step)}
    for name in ("draft_ms", "verify_ms", "texts"):
        if not record[name]:
            del record[name]
    return dump_line(record)


def dump_line(record: Mapping[str, Any]) -> str:
    """Strict, ASCII-only JSON on one line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)
