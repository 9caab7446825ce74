"""Tree attention of DeepSeek's MLA on one GPU, side by side with what vLLM has.

For each batch, context, number of heads and rows per request, in microseconds:

* ``ours_us``: FLASH_ATTN_MLA with trees, FlashAttention 3 over the prefix, then
  ``tree_suffix_attention``;
* ``fa3_chain_us``: FlashAttention 3 causal over the same rows, as upstream verifies a
  chain;
* ``stock_triton_us``: upstream's TRITON_MLA over the same rows;
* ``triton_only_us``: TRITON_MLA with trees, ``paged_tree_attention``;
* ``one_row_us``: FlashAttention 3 with one row, the cost without speculation.

Every call sits in a CUDA graph of several calls, each on the cache of another layer so
that L2 does not hold the KV; graphs are replayed in turn and the medians reported.
Schedules are made outside the graphs, as vLLM does. Kernel tests run first, and every
row checks that the contestants agree.

    python -m benchmarks.kernels.bench_tree_attention --out benchmarks/results/...json
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import write_record

PAGE, LATENT, ROPE = 64, 512, 64
SCALE = 192**-0.5
NUM_SPLITS = 32
"""vLLM's flash_attn_max_num_splits_for_cuda_graph."""
ROTATE_BYTES = 200e6
TOLERANCE = 0.03
"""Outputs are averages of normals rounded to bfloat16 three times."""

TESTS = [
    "tests/kernels/test_tree_attention.py",
    "tests/kernels/test_tree_attention_gpu.py",
]

Call = Callable[[int], torch.Tensor]


@dataclass
class Batch:
    """Random tensors of one shape; ``caches`` holds several layers."""

    batch: int
    context: int
    heads: int
    rows: int
    caches: list[torch.Tensor]
    block_table: torch.Tensor

    def __post_init__(self) -> None:
        shape = (self.batch * self.rows, self.heads)
        self.q_nope = torch.randn(*shape, LATENT, dtype=torch.bfloat16, device="cuda")
        pe = torch.randn(*shape, 128 + ROPE, dtype=torch.bfloat16, device="cuda")
        self.q_pe = pe[..., 128:]
        reqs = torch.arange(self.batch, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(
            0, self.batch * self.rows + 1, self.rows, device="cuda", dtype=torch.int32
        )
        self.prefix_lens = torch.full_like(reqs, self.context)
        self.seq_lens = self.prefix_lens + self.rows
        tokens = self.context + torch.arange(self.rows, device="cuda")
        blocks = self.block_table[:, tokens // PAGE].long()
        self.slots = (blocks * PAGE + tokens % PAGE).flatten()
        masks = [1]
        for row in range(1, self.rows):
            masks.append(masks[(row - 1) // 2] | 1 << row)
        signed = [m - (1 << 64) if m >> 63 else m for m in masks]
        self.masks = torch.tensor(signed * self.batch, device="cuda")


def build_caches(batch: int, context: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Paged caches of several layers, pages of a request scattered."""
    pages = -(-(context + 64) // PAGE)
    size = batch * pages * PAGE * (LATENT + ROPE) * 2
    layers = max(1, min(16, -(-int(ROTATE_BYTES) // size)))
    shape = (batch * pages, PAGE, LATENT + ROPE)
    caches = [
        torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)
    ]
    order = torch.randperm(batch * pages, device="cuda", dtype=torch.int32)
    return caches, order.view(batch, pages)


def fa3_call(b: Batch, causal: bool) -> Callable[[int], Any]:
    """FlashAttention 3 on layer i: the whole sequence, or the prefix with LSE."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    lens = b.seq_lens if causal else b.prefix_lens
    longest = b.context + b.rows
    schedule = get_scheduler_metadata(
        batch_size=b.batch,
        max_seqlen_q=b.rows,
        max_seqlen_k=longest,
        num_heads_q=b.heads,
        num_heads_kv=1,
        headdim=ROPE,
        cache_seqlens=lens,
        qkv_dtype=torch.bfloat16,
        headdim_v=LATENT,
        page_size=PAGE,
        cu_seqlens_q=b.starts,
        causal=causal,
        num_splits=NUM_SPLITS,
    )

    def call(i: int) -> Any:
        cache = b.caches[i % len(b.caches)]
        return flash_attn_varlen_func(
            q=b.q_pe,
            k=cache[..., LATENT:].unsqueeze(-2),
            v=cache[..., :LATENT].unsqueeze(-2),
            q_v=b.q_nope,
            max_seqlen_q=b.rows,
            cu_seqlens_q=b.starts,
            max_seqlen_k=longest,
            seqused_k=lens,
            block_table=b.block_table,
            softmax_scale=SCALE,
            causal=causal,
            return_softmax_lse=not causal,
            fa_version=3,
            scheduler_metadata=schedule,
            num_splits=NUM_SPLITS,
        )

    return call


def suffix_call(b: Batch, tree: bool = True, config: Any = None) -> Callable[..., Any]:
    """The suffix kernel of layer i on a prefix output and its LSE, in place."""
    from vllm_mtp.kernels.tree_attention import tree_suffix_attention

    def call(i: int, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        cache = b.caches[i % len(b.caches)]
        return tree_suffix_attention(
            (b.q_nope, b.q_pe),
            cache,
            cache[..., :LATENT],
            b.starts,
            b.masks if tree else None,
            b.starts[:-1],
            b.slots,
            b.rows,
            out,
            lse.T,
            SCALE,
            max_query_len=b.rows,
            prefix_lens=b.prefix_lens,
            out=out,
            config=config,
        )

    return call


def ours_call(b: Batch, tree: bool = True, config: Any = None) -> Call:
    """FLASH_ATTN_MLA with trees."""
    prefix, suffix = fa3_call(b, causal=False), suffix_call(b, tree, config)
    return lambda i: suffix(i, *prefix(i))


def paged_call(
    b: Batch, tree: bool = True, config: Any = None, num_splits: int | None = None
) -> Call:
    """TRITON_MLA with trees."""
    from vllm_mtp.kernels.paged_tree_attention import paged_tree_attention

    return lambda i: paged_tree_attention(
        (b.q_nope, b.q_pe),
        b.caches[i % len(b.caches)],
        b.block_table,
        b.prefix_lens,
        b.starts,
        b.masks if tree else None,
        b.starts[:-1],
        b.slots,
        b.rows,
        SCALE,
        max_query_len=b.rows,
        max_prefix_len=b.context + b.rows,
        config=config,
        num_splits=num_splits,
    )


def stock_triton_call(b: Batch) -> Call:
    """Upstream's TritonMLAImpl.forward_mqa, unchanged."""
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    impl = SimpleNamespace(
        kv_lora_rank=LATENT, scale=SCALE, dcp_world_size=1, _sm_count=sms
    )
    one = torch.ones(1, device="cuda")
    layer = SimpleNamespace(_k_scale=one)
    decode = SimpleNamespace(block_table=b.block_table, seq_lens=b.seq_lens)
    metadata = SimpleNamespace(
        decode=decode, causal=True, max_seq_len=b.context + b.rows
    )
    return lambda i: TritonMLAImpl.forward_mqa(
        impl, (b.q_nope, b.q_pe), b.caches[i % len(b.caches)], metadata, layer
    )[0]


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls on consecutive layers, warmed up."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_calls(
    calls: dict[str, Call], per_graph: dict[str, int], rounds: int = 11
) -> dict[str, float]:
    """Median microseconds of one call each, replaying the graphs in turn."""
    graphs = {name: capture(call, per_graph[name]) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / per_graph[name])
    return {name: round(statistics.median(ts), 2) for name, ts in times.items()}


def check_agreement(b: Batch) -> None:
    """Raise unless all contestants compute the same on this batch."""
    chain = fa3_call(b, causal=True)(0)
    tree = ours_call(b)(0)
    pairs = {
        "ours, causal masks": (ours_call(b, tree=False)(0), chain),
        "triton_only, causal masks": (paged_call(b, tree=False)(0), chain),
        "triton_only": (paged_call(b)(0), tree),
    }
    for name, (found, expected) in pairs.items():
        error = (found.float() - expected.float()).abs().max().item()
        if not error <= TOLERANCE:
            raise SystemExit(
                f"{name} is off by {error} at batch {b.batch}, context {b.context}, "
                f"{b.heads} heads, {b.rows} rows: no numbers from wrong kernels."
            )


def measure(b: Batch, one_row_us: float | None) -> dict[str, Any]:
    """One row of the table."""
    check_agreement(b)
    calls: dict[str, Call] = {
        "ours_us": ours_call(b),
        "fa3_chain_us": fa3_call(b, causal=True),
        "stock_triton_us": stock_triton_call(b),
        "triton_only_us": paged_call(b),
    }
    many = 16 if b.batch * b.context <= 1 << 18 else 8
    per_graph = dict.fromkeys(calls, many) | {"stock_triton_us": 2}
    row = {"batch": b.batch, "context": b.context, "heads": b.heads, "rows": b.rows}
    times = time_calls(calls, per_graph)
    first = times["fa3_chain_us"] if b.rows == 1 else one_row_us
    return row | times | {"one_row_us": first}


def grid(quick: bool) -> list[tuple[int, int, int, list[int]]]:
    """(batch, context, heads, rows) to measure."""
    rows = [1, 8] if quick else [1, 8, 16, 32]
    contexts = [1024, 12288] if quick else [1024, 4096, 12288, 32768]
    small = [(n, c, 16, rows) for n in (1, 16, 64, 4) for c in contexts]
    return [(n, c, 128, [1, 8]) for n in (1, 16) for c in contexts] + small


def main() -> None:
    """Test, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="a third of the table")
    args = parser.parse_args()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *TESTS], check=False
    )
    if tests.returncode:
        raise SystemExit("The kernel tests fail: no numbers from wrong kernels.")
    table = []
    for batch, context, heads, rows in grid(args.quick):
        caches, block_table = build_caches(batch, context)
        one_row = None
        for n in rows:
            b = Batch(batch, context, heads, n, caches, block_table)
            row = measure(b, one_row)
            one_row = row["one_row_us"]
            table.append(row)
            print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
        del caches, b
        torch.cuda.empty_cache()
        write_record(args.out, table)


if __name__ == "__main__":
    main()
