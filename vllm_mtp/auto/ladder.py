"""The tree sizes that ``"shape": "auto"`` chooses from."""

from dataclasses import dataclass

from vllm_mtp.config import TreeShape

PAIRS = ((1, 1), (2, 2), (3, 3), (5, 3), (7, 6), (15, 6))
"""(N, S) of the rungs. Each N occurs once, so that the count of draft tokens, which
vLLM's scheduler hands to the worker, names the rung. Chosen in simulation on traced
trees: sampled text wants shallow trees, greedy text deep ones, large batches small
ones. With the root, 8 and 16 rows fill the tiles of attention kernels."""

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes with CUDA graphs; a batch between two runs padded to the next."""

MAX_GRAPH_ROWS = 2048
"""Rows of the largest verify graph: each costs memory, and larger trees do not pay in
larger batches."""


@dataclass(frozen=True)
class Rung:
    """One size of tree; ``num_nodes`` 0 is no speculation."""

    num_nodes: int
    """N, drafted nodes verified per step."""

    num_steps: int
    """S, the greatest depth."""


OFF = Rung(0, 0)


def build_ladder(largest: TreeShape) -> tuple[Rung, ...]:
    """Off, then every rung that ``largest`` holds, ``largest`` itself last."""
    rungs = [OFF]
    for nodes, steps in PAIRS:
        if nodes >= largest.num_nodes:
            break
        steps = min(steps, largest.num_steps)
        cand = TreeShape(largest.num_steps, largest.topk, 1).candidates_of(steps)
        if nodes <= cand:
            rungs.append(Rung(nodes, steps))
    rungs.append(Rung(largest.num_nodes, largest.num_steps))
    return tuple(rungs)


def graph_batches(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, the largest possible batch last."""
    return [b for b in GRAPH_BATCHES if b < max_num_seqs] + [max_num_seqs]


def graph_sizes(ladder: tuple[Rung, ...], topk: int, max_num_seqs: int) -> list[int]:
    """``cudagraph_capture_sizes``: rows of every (batch, rung), and of draft levels."""
    batches = graph_batches(max_num_seqs)
    widths = {rung.num_nodes + 1 for rung in ladder} | {topk}
    sizes = {batch * width for batch in batches for width in widths}
    return sorted(size for size in sizes if size <= MAX_GRAPH_ROWS)
