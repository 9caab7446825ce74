"""Accept lengths of chains and trees on held-out prompts, at several temperatures.

    python -m benchmarks.acceptance --out benchmarks/results/acceptance.json

Accept length = tokens per verify pass = 1 + accepted drafts / drafts, from vLLM's own
counters. Methods: ``chain_greedy`` and ``chain_probabilistic`` are vLLM's in-tree
``mtp``; ``tree_topk`` is a tree whose children are the k most likely tokens;
``tree_coupled`` and ``chain_coupled`` (this plugin) draft with the noise that the
target's sampler will use; ``chain_coupled_unwarmed`` ranks drafts at the request's own
temperature instead of 1.1 times that. At temperature 0 coupled and top-k are the same
thing.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_record
from tests.helpers.engine import counters, engine, runner_of
from tests.helpers.prompts import held_out

STEPS = 3
NUM_PROMPTS, NUM_TOKENS = 32, 128
GPU_SETTINGS: dict[str, Any] = {
    "attention_backend": None,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": NUM_PROMPTS,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 2 << 30,
}

CPU_SETTINGS: dict[str, Any] = {"max_num_seqs": 16}
"""Float32 and interpreted kernels otherwise, as in ``tests.helpers.engine``."""


def chain(**settings: Any) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": STEPS, **settings}


def tree(steps: int, topk: int, nodes: int) -> dict[str, Any]:
    return {
        "method": "mtp_tree",
        "num_steps": steps,
        "topk": topk,
        "num_speculative_tokens": nodes,
    }


NO_DIFFERENCE = ("chain_probabilistic", "tree_topk", "chain_coupled_unwarmed")
"""Methods that are another one at temperature 0."""

CONFIGS: list[tuple[str, int, dict[str, Any]]] = [
    ("chain_greedy", 3, chain()),
    ("chain_probabilistic", 3, chain(draft_sample_method="probabilistic")),
    ("chain_coupled", 3, tree(3, 1, 3)),
    ("tree_coupled", 3, tree(3, 4, 3)),
    ("tree_coupled", 7, tree(3, 4, 7)),
    ("tree_coupled", 15, tree(3, 4, 15)),
    ("tree_coupled_deep", 32, tree(5, 8, 32)),
]


def measure(config: tuple[str, int, dict[str, Any]], temperatures: list[float]) -> Any:
    """Rows of one engine; a coupled tree is also measured without its noise."""
    method, nodes, speculative = config
    rows = []
    settings = GPU_SETTINGS if torch.cuda.is_available() else CPU_SETTINGS
    with engine(speculative, **settings) as llm:
        for name in variants(llm, method):
            for temperature in temperatures:
                if temperature == 0 and name in NO_DIFFERENCE:
                    continue
                before = totals(llm)
                generate(llm, temperature)
                after = totals(llm)
                drafts = after["drafts"] - before["drafts"]
                accepted = [
                    a - b
                    for a, b in zip(after["depths"], before["depths"], strict=True)
                ]
                row = {
                    "temperature": temperature,
                    "method": name,
                    "nodes": nodes,
                    "accept_length": round(1 + sum(accepted) / drafts, 3),
                    "accepted_per_depth": [round(a / drafts, 3) for a in accepted if a],
                }
                rows.append(row)
                print(row, flush=True)
    return rows


def variants(llm: Any, method: str) -> Iterator[str]:
    yield method
    if method == "chain_coupled":
        runner_of(llm).speculator.warmth = 1.0
        yield "chain_coupled_unwarmed"
    if method == "tree_coupled":
        runner_of(llm).speculator.coupled = False
        yield "tree_topk"


def generate(llm: Any, temperature: float) -> None:
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": p} for p in held_out(NUM_PROMPTS)]
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        for i in range(NUM_PROMPTS)
    ]
    llm.generate(inputs, params, use_tqdm=False)


def totals(llm: Any) -> dict[str, Any]:
    found = counters(llm)
    depths = list(found["num_accepted_tokens_per_pos"])
    depths += [0] * (64 - len(depths))
    return {"drafts": found["num_drafts"], "depths": depths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperatures", default="0,0.6,1.0")
    parser.add_argument("--only", type=int, nargs="*", help="indices into CONFIGS")
    args = parser.parse_args()
    temperatures = [float(t) for t in args.temperatures.split(",")]
    rows: list[Any] = []
    for index, config in enumerate(CONFIGS):
        if args.only is None or index in args.only:
            rows += measure(config, temperatures)
            write_record(args.out, rows, prompts=NUM_PROMPTS, tokens=NUM_TOKENS)


if __name__ == "__main__":
    main()
