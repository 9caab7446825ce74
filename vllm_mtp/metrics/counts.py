"""What is counted, under which names, and what a worker reports of each pass.

A count travels as ``name`` or ``name/label value``. The scheduler counts, because it
decides whose output is used: a pass whose request was aborted meanwhile counts neither
here nor in vLLM's ``spec_decode`` counters, so the two always fit each other.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm_mtp.auto.ladder import Rung, build_ladder
from vllm_mtp.config import MTPConfig, candidates

REASONS = ("prefill", "max_model_len", "token_budget", "grammar", "policy")
"""Why a step had no drafts: the prompt was read (also again, after a preemption); no
room before ``max_model_len`` or in ``max_num_batched_tokens``; the grammar took none;
none were asked for in the pass before."""

PHASES = ("drafting", "verifying", "bookkeeping")
"""The MTP layer and the tree search; the target's pass over the rows; everything
between the two: sampling, the walk, the commit."""

PREFIX = "vllm:mtp_tree_"
"""Before each name: ``LLM.get_metrics()`` shows what begins with ``vllm:``."""


@dataclass(frozen=True)
class Total:
    """A total that only rises."""

    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    """Label values shown from the start, at 0."""


def totals(config: MTPConfig) -> dict[str, Total]:
    """Name without ``PREFIX`` -> total, for a server with these settings."""
    widths = [config.shape.num_nodes]
    if config.auto:
        widths = sorted({rung.num_nodes for rung in build_ladder(config.shape)})
    found = {
        "nodes_drafted": Total("Candidates drafted; the root is never counted."),
        "nodes_verified": Total(
            "Drafted nodes verified by the target, without the root and padding."
        ),
        "passes": Total(
            "Passes with decoding requests, by the nodes of the widest tree in them.",
            "nodes",
            tuple(map(str, widths)),
        ),
        "steps_without_drafts": Total(
            "Steps of requests that emitted a token without drafts, by reason.",
            "reason",
            REASONS,
        ),
    }
    if config.timing or config.trace is not None:
        found["phase_microseconds"] = Total(
            "Microseconds of passes by phase.",
            "phase",
            PHASES,
        )
    return found


@dataclass(frozen=True)
class PassNote:
    """What the scheduler cannot know of a pass; the worker hangs it on its output."""

    nodes_per_tree: int
    """Candidates drafted after the pass for each request with a tree; 0: none."""

    nodes_per_chain: int
    """The same for each request with a chain."""

    new_chains: tuple[str, ...] = ()
    """Requests new in the pass that draft chains."""

    phase_us: dict[str, int] = field(default_factory=dict)
    """Microseconds by phase, of passes that were complete by now."""


def note_of(topk: int, rung: Rung, **more: Any) -> PassNote:
    """The note of a pass that drafted trees of this rung after it."""
    steps = rung.num_steps
    found = candidates(steps, topk, rung.frontier) if steps else 0
    return PassNote(found, steps, **more)
