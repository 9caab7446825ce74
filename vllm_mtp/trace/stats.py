"""Figures of a trace: accept length, acceptance by depth, nodes."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from vllm_mtp.trace.schema import Step
from vllm_mtp.tree.layout import NO_PARENT


@dataclass(frozen=True)
class Summary:
    """Figures of some steps. Per-depth lists start at depth 1."""

    steps: int
    """Verify passes, counted once per request, with or without drafts."""

    drafted_steps: int
    steps_without_drafts: int
    emitted: int
    """Tokens produced by all steps."""

    nodes: int
    """Drafted nodes verified; the root is not counted."""

    accepted: int
    """Drafted nodes accepted."""

    accepted_per_depth: tuple[int, ...]
    """Steps in which a node of this depth was accepted."""

    predicted_per_depth: tuple[float, ...]
    """The same as the drafter's scores foresaw it."""

    reached_per_depth: tuple[int, ...]
    """Steps whose tree was this deep."""

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens per drafted step: 1 + accepted / drafted steps. None without any."""
        return _ratio(self.accepted + self.drafted_steps, self.drafted_steps)

    @property
    def predicted_accept_length(self) -> float | None:
        """The accept length that the drafter's scores foresaw."""
        total = sum(self.predicted_per_depth) + self.drafted_steps
        return _ratio(total, self.drafted_steps)

    @property
    def nodes_per_step(self) -> float | None:
        """Nodes verified per drafted step."""
        return _ratio(self.nodes, self.drafted_steps)

    @property
    def acceptance_per_depth(self) -> tuple[float, ...]:
        """Share of the drafted steps in which this depth was accepted."""
        return tuple(n / self.drafted_steps for n in self.accepted_per_depth)

    def to_dict(self) -> dict[str, Any]:
        """Counts and ratios as plain values; a ratio without steps is None."""
        return asdict(self) | {
            "mean_accept_length": self.mean_accept_length,
            "predicted_accept_length": self.predicted_accept_length,
            "nodes_per_step": self.nodes_per_step,
            "acceptance_per_depth": self.acceptance_per_depth,
        }


def summarize(steps: Iterable[Step]) -> Summary:
    """Add up the figures of the given steps; a step without drafts is told apart."""
    steps = list(steps)
    drafted = [step for step in steps if step.num_nodes]
    depth = max((max(step.depths) for step in drafted), default=0)
    accepted, predicted, reached = [0] * depth, [0.0] * depth, [0] * depth
    for step in drafted:
        for d in range(max(step.depths)):
            reached[d] += 1
        for d in range(step.num_accepted):
            accepted[d] += 1
        for row, score in enumerate(step.scores):
            if step.parents[row] != NO_PARENT and score is not None:
                predicted[step.depths[row] - 1] += math.exp(min(score, 0.0))
    return Summary(
        steps=len(steps),
        drafted_steps=len(drafted),
        steps_without_drafts=len(steps) - len(drafted),
        emitted=sum(len(step.path) for step in steps),
        nodes=sum(step.num_nodes for step in drafted),
        accepted=sum(step.num_accepted for step in drafted),
        accepted_per_depth=tuple(accepted),
        predicted_per_depth=tuple(round(p, 4) for p in predicted),
        reached_per_depth=tuple(reached),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
