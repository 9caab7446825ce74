"""Steps under vLLM's check for host syncs; run with VLLM_GPU_SYNC_CHECK=error.

Prints ``clean`` for each configuration that decoded without a sync, and ``caught`` when
a sync made on purpose was noticed. A process of its own, since vLLM reads the variable
when it is imported.
"""

import itertools
import sys
from typing import Any

from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.prompts import held_out
from vllm_mtp.tuning.run import policy_of

SETTINGS: dict[str, Any] = {
    "attention_backend": None,
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_model_len": 2048,
    "max_num_seqs": 40,
    "kv_cache_memory_bytes": 1 << 30,
}


def run(llm: Any) -> None:
    """Greedy and sampled requests, with penalties and logprobs, prefill beside them."""
    from vllm import SamplingParams

    extras: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    ]
    params = [
        SamplingParams(
            **({"temperature": 0.0} | extras[i % 4]), max_tokens=40, ignore_eos=True
        )
        for i in range(48)
    ]
    generate(llm, held_out(48, (1, 8, 33, 120)), params)


def use_every_size(llm: Any) -> None:
    """One after the other, whatever pays."""
    policy = policy_of(llm)
    steps = itertools.count()
    policy.choose = lambda batch, context: next(steps) // 3 % len(policy.ladder)


def main() -> None:
    for name, config in {
        "tree": {"method": "mtp_tree", "shape": "fixed"},
        "auto": {"method": "mtp_tree", "share_nodes": True},
    }.items():
        with engine(config, **SETTINGS) as llm:
            if name == "auto":
                use_every_size(llm)
            run(llm)
            print(name, "clean", flush=True)
            if name == "tree":
                verifier = runner_of(llm).rejection_sampler
                verifier.observer = lambda _batch, _fed, drawn, _n: drawn.sum().item()
                try:
                    run(llm)
                except Exception as error:
                    print("caught", error, flush=True)


if __name__ == "__main__":
    sys.exit(main())
