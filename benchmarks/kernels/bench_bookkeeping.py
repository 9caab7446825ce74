"""Time the tree bookkeeping of a step under CUDA graph replay; write JSON.

    python -m benchmarks.kernels.bench_bookkeeping --out benchmarks/results/...json

Tests of the kernels run first; if one fails, nothing is reported. Shape (S, k, N) =
(3, 4, 7), vocabulary 129,280, bfloat16 logits, hidden size 7168, 61 layers of MLA cache
(576 bfloat16 a token). A row: ``what`` (``step`` = every bookkeeping kernel of a step
once, in one graph; ``kv_commit``; or a kernel's name; ``..._sampled`` = temperature 1
instead of 0), ``batch``, ``us``. In the commit of a step every request has three
accepted drafts and every one of them moves: the worst case. Single kernels are timed in
a graph of many copies over changing memory, so that caches do not help more than in a
step.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_record
from vllm_mtp.buffers import build_tree_buffers
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels.kv_commit import build_kv_table, commit_kv, commit_rows
from vllm_mtp.kernels.tree_expand import expand_tree
from vllm_mtp.kernels.tree_pack import pack_tree
from vllm_mtp.kernels.tree_rows import prepare_tree_rows
from vllm_mtp.kernels.tree_topk import build_topk_workspace, tree_topk
from vllm_mtp.kernels.tree_verify import verify_tree

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "test_tree_topk",
    "test_tree_expand",
    "test_tree_pack",
    "test_tree_rows",
    "test_tree_verify",
    "test_kv_commit",
)
SHAPE = TreeShape(num_steps=3, topk=4, num_nodes=7)
VOCAB_SIZE, HIDDEN_SIZE = 129_280, 7168
NUM_LAYERS, BLOCK_SIZE, KV_ROW = 61, 64, 576
BLOCKS_PER_REQUEST = 16
COPIES = 12
"""Launches of one kernel in a graph, over as many different inputs as there are."""


class Step:
    """Inputs and outputs of one step at one batch size."""

    def __init__(self, batch: int, temperature: float) -> None:
        self.batch = batch
        torch.set_default_device("cuda")
        generator = torch.Generator("cuda").manual_seed(batch)
        rows, k = SHAPE.num_rows, SHAPE.topk
        num_tokens = batch * rows
        self.buffers = build_tree_buffers(
            SHAPE, batch, num_tokens, torch.device("cuda")
        )
        self.workspace = build_topk_workspace(batch * k, VOCAB_SIZE, "cuda")
        self.logits = [
            _peaked_logits(batch * (1 if level == 0 else k), generator)
            for level in range(SHAPE.num_steps)
        ]
        self.idx_mapping = torch.randperm(batch, generator=generator)
        self.temperature = torch.full((batch,), temperature)
        self.seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
        self.prefill_len = torch.full((batch,), 100, dtype=torch.int32)
        self.starts = (torch.arange(batch + 1) * rows).int()
        self.positions = torch.arange(rows).repeat(batch) + 1000
        self.root_positions = torch.full((batch,), 1000)
        self.frontier_ids = torch.zeros(batch * k, dtype=torch.int32)
        # Every row carries the token drawn everywhere: the walk goes all the way down.
        self.input_ids = torch.full((num_tokens,), 7, dtype=torch.int32)
        self.sampled = torch.full((num_tokens,), 7)
        self.emitted = torch.empty(batch, rows, dtype=torch.int64)
        self.num_emitted = torch.empty(batch, dtype=torch.int32)
        self.hidden = torch.randn(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
        self.frontier_hidden = torch.empty_like(self.hidden)
        self.draft_tokens = torch.empty(batch, SHAPE.num_nodes, dtype=torch.int64)
        # Three accepted drafts per request, and none of them is in its place yet.
        path = torch.tensor([0, 2, 4, 7, 4, 5, 6, 7]).int()
        self.path = path.repeat(batch, 1)
        self.num_accepted = torch.full((batch,), 4, dtype=torch.int32)
        num_blocks = batch * BLOCKS_PER_REQUEST
        self.kv_caches = [
            torch.randn(num_blocks, BLOCK_SIZE, KV_ROW, dtype=torch.bfloat16)
            for _ in range(NUM_LAYERS)
        ]
        self.kv_table = build_kv_table(self.kv_caches, [0] * NUM_LAYERS)
        # Rows of a request lie in one block; each copy is in another.
        first = torch.arange(batch)[:, None] * BLOCKS_PER_REQUEST * BLOCK_SIZE
        self.slot_mappings = [
            (first + copy * BLOCK_SIZE + 3 + torch.arange(rows)).view(1, -1)
            for copy in range(COPIES)
        ]

    def rows(self, copy: int = 0) -> None:
        prepare_tree_rows(
            self.buffers,
            self.idx_mapping,
            self.starts,
            self.starts,
            self.prefill_len,
            self.positions,
        )

    def verify(self, copy: int = 0) -> None:
        verify_tree(
            self.buffers,
            self.sampled,
            self.input_ids,
            self.idx_mapping,
            self.starts,
            self.emitted,
            self.num_emitted,
        )

    def commit_kv(self, copy: int = 0) -> None:
        slots = self.slot_mappings[copy]
        commit_kv(self.kv_table, slots, self.path, self.num_accepted, self.starts)

    def commit_rows(self, copy: int = 0) -> None:
        commit_rows(
            self.path,
            self.num_accepted,
            self.starts,
            self.hidden,
            self.input_ids,
            self.positions,
        )

    def topk(self, level: int) -> None:
        tree_topk(
            self.logits[level],
            self.buffers.topk_ids,
            self.buffers.topk_logprobs,
            self.idx_mapping,
            self.temperature,
            self.seeds,
            self.root_positions,
            level,
            self.workspace,
        )

    def expand(self, depth: int) -> None:
        expand_tree(
            self.buffers,
            depth,
            self.idx_mapping,
            self.hidden,
            self.frontier_hidden,
            self.frontier_ids,
        )

    def pack(self, copy: int = 0) -> None:
        pack_tree(self.buffers, self.idx_mapping, self.draft_tokens)

    def run(self, copy: int = 0) -> None:
        """Every bookkeeping kernel of a step, in its order."""
        self.rows()
        self.verify()
        self.commit_kv(copy)
        self.commit_rows()
        for level in range(SHAPE.num_steps):
            self.topk(level)
            self.expand(level + 1)
        self.pack()

    def kernels(self) -> dict[str, Callable[[int], None]]:
        """What to time on its own; the argument is the number of the copy."""
        return {
            "prepare_tree_rows": self.rows,
            "verify_tree": self.verify,
            "kv_commit": self.commit_kv,
            "commit_rows": self.commit_rows,
            "tree_topk_root": lambda _: self.topk(0),
            "tree_topk": lambda copy: self.topk(1 + copy % 2),
            "expand_tree": lambda _: self.expand(2),
            "expand_tree_last": lambda _: self.expand(3),
            "pack_tree": self.pack,
        }


def _peaked_logits(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Logits with four likely tokens a row, as a language model's have."""
    logits = torch.randn(rows, VOCAB_SIZE, generator=generator) * 2
    likely = torch.randint(0, VOCAB_SIZE, (rows, 4), generator=generator)
    logits.scatter_(1, likely, torch.tensor([18.0, 17.0, 16.0, 15.0]).expand(rows, 4))
    return logits.bfloat16()


def time_graph(launch: Callable[[int], None], copies: int) -> float:
    """Microseconds of one launch, the median of replays of a graph of ``copies``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for copy in range(copies):
            launch(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            launch(copy)
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (10 * copies))
    return statistics.median(times)


def measure(batches: Sequence[int]) -> list[dict[str, Any]]:
    """All rows of the result."""
    rows: list[dict[str, Any]] = []

    def report(what: str, batch: int, us: float) -> None:
        rows.append({"what": what, "batch": batch, "us": round(us, 2)})
        print(f"{what:24} batch {batch:4} {us:8.2f} us", flush=True)

    for batch in batches:
        step = Step(batch, temperature=0.0)
        report("step", batch, time_graph(step.run, 1))
        for name, launch in step.kernels().items():
            report(name, batch, time_graph(launch, COPIES))
        step.temperature.fill_(1.0)
        report("step_sampled", batch, time_graph(step.run, 1))
        report("tree_topk_sampled", batch, time_graph(step.kernels()["tree_topk"], 12))
        del step
        torch.cuda.empty_cache()
    return rows


def run_tests() -> None:
    """Run the kernels' tests, a process per file; exit if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen([*command, f"tests/kernels/{name}.py"], cwd=ROOT)
        for name in TESTS
    ]
    failed = [name for name, test in zip(TESTS, running, strict=True) if test.wait()]
    if failed:
        sys.exit(f"bench_bookkeeping: {', '.join(failed)} failed, so no numbers")


def main() -> None:
    parser = argparse.ArgumentParser(description="time the tree bookkeeping kernels")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_bookkeeping: needs a CUDA GPU")
    run_tests()
    write_record(args.out, measure(args.batches))


if __name__ == "__main__":
    main()
