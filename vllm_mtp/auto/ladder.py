"""The tree sizes that ``"shape": "auto"`` chooses from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_mtp.config import MTPConfig, TreeShape, candidates

EQUAL = (
    (1, 1, 1),
    (2, 2, 1),
    (3, 3, 1),
    (4, 4, 1),
    (5, 3, 2),
    (7, 6, 1),
    (8, 4, 2),
    (12, 6, 2),
)
"""(N, S, F) of the rungs. Chosen in simulation on traced trees and measured costs:
sampled text wants shallow trees, greedy text deep ones, large batches small ones, and
what a wider frontier adds to few nodes is less than its levels cost (docs/load.md)."""

SHARED = ((2, 4, 6), (3, 6, 9), (5, 6, 10))
"""(N, S, drafts) of the rungs whose batch shares its nodes: a request drafts and may
verify so many, and N on average. Its drafts, too, name a rung, so no number of drafts
occurs twice here and in ``EQUAL``."""

SHARED_FROM = 32
"""Requests from which on a batch shares: smaller ones have room for equal trees that
are larger, and gain less."""

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes with CUDA graphs; a batch between two runs padded to the next."""

MAX_GRAPH_ROWS = 2048
"""Rows of the largest verify graph: each costs memory, and larger trees do not pay in
larger batches."""


@dataclass(frozen=True)
class Rung:
    """One size of tree; ``num_nodes`` 0 is no speculation."""

    num_nodes: int
    """N, drafted nodes that a request verifies per step, on average."""

    num_steps: int
    """S, the greatest depth."""

    num_drafts: int = -1
    """Nodes that a request drafts, and the most it may verify; -1: N. The scheduler
    hands this number to the worker, so it names the rung."""

    frontier: int = 1
    """F, nodes expanded per level."""

    def __post_init__(self) -> None:
        if self.num_drafts < 0:
            object.__setattr__(self, "num_drafts", self.num_nodes)

    @property
    def levels(self) -> tuple[int, int]:
        """S and F, which name the graph of its draft levels."""
        return self.num_steps, self.frontier

    @property
    def is_shared(self) -> bool:
        """Whether the batch verifies its best nodes, not every request as many."""
        return self.num_drafts > self.num_nodes

    def to_list(self) -> list[int]:
        """N and S, and the drafts of a request where it is shared."""
        shared = [self.num_drafts] if self.is_shared else []
        return [self.num_nodes, self.num_steps, *shared]


OFF = Rung(0, 0)


def build_ladder(largest: TreeShape, may_share: bool = False) -> tuple[Rung, ...]:
    """Off, then every rung that ``largest`` holds, ``largest`` itself last.

    A shared rung comes after the equal one of as many nodes, if that is there too.
    """
    rungs, topk = [OFF], largest.topk
    shared = {n: (steps, drafts) for n, steps, drafts in SHARED if may_share}
    for nodes, steps, frontier in EQUAL:
        if nodes >= largest.num_nodes:
            break
        steps, frontier = min(steps, largest.num_steps), min(frontier, largest.frontier)
        if nodes > candidates(steps, topk, frontier):
            continue
        rungs.append(Rung(nodes, steps, frontier=frontier))
        deep, drafts = shared.get(nodes, (0, 0))
        fits = 0 < deep <= largest.num_steps and drafts < largest.num_nodes
        if fits and drafts <= candidates(deep, topk, 1):
            rungs.append(Rung(nodes, deep, drafts))
    rungs.append(rung_of(largest))
    return tuple(rungs)


def rung_of(shape: TreeShape) -> Rung:
    """The rung of a whole shape."""
    return Rung(shape.num_nodes, shape.num_steps, frontier=shape.frontier)


def ladder_of(vllm_config: Any, config: MTPConfig) -> tuple[Rung, ...]:
    """The ladder of an engine, the same in its scheduler and its workers.

    Nothing is shared where there are LoRA adapters: vLLM finds a row's adapter by the
    host's row counts.
    """
    may_share = config.share_nodes and vllm_config.lora_config is None
    return build_ladder(config.shape, may_share)


def shared_nodes(ladder: Iterable[Rung]) -> dict[int, int]:
    """Drafts of a request -> N, of the rungs whose batch shares its nodes."""
    return {rung.num_drafts: rung.num_nodes for rung in ladder if rung.is_shared}


def nodes_of_step(nodes_of: Mapping[int, int], scheduler_output: Any) -> int:
    """N of the rung whose nodes the requests of this step share; 0: they do not.

    The drafts of the widest request name the rung. Nothing is shared where rows are
    filled in on the host (grammars), which must know whose they are.
    """
    if not nodes_of or scheduler_output.has_structured_output_requests:
        return 0
    drafts = scheduler_output.scheduled_spec_decode_tokens.values()
    return nodes_of.get(max(map(len, drafts), default=0), 0)


def graph_batches(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, the largest possible batch last."""
    return [b for b in GRAPH_BATCHES if b < max_num_seqs] + [max_num_seqs]


def shared_graphs(ladder: tuple[Rung, ...], max_num_seqs: int) -> list[tuple[int, int]]:
    """(requests, rows) of the verify graphs for batches that share their nodes."""
    sizes = {rung.num_nodes + 1 for rung in ladder if rung.is_shared}
    return [
        (batch, batch * width)
        for width in sorted(sizes)
        for batch in graph_batches(max_num_seqs)
        if batch >= SHARED_FROM and batch * width <= MAX_GRAPH_ROWS
    ]


def graph_sizes(ladder: tuple[Rung, ...], max_num_seqs: int) -> list[int]:
    """``cudagraph_capture_sizes``: rows of every (batch, rung), and of draft levels."""
    batches = graph_batches(max_num_seqs)
    widths = {rung.num_nodes + 1 for rung in ladder}
    widths |= {rung.frontier for rung in ladder}
    sizes = {batch * width for batch in batches for width in widths}
    return sorted(size for size in sizes if size <= MAX_GRAPH_ROWS)
