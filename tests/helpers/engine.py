"""Start vLLM in this process on the tiny model, the same way everywhere."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[2] / "examples" / "tiny_deepseek" / "model"

CPU_SETTINGS: dict[str, Any] = {
    # The reference MLA backend of vLLM's CPU build, in float32 for exact comparisons.
    "attention_backend": "CPU_MLA",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
}


WITH_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""CUDA graphs without ``torch.compile``, which takes a minute or more an engine and has
no part in trees; ``test_ids_bf16.py`` and ``test_no_sync.py`` run with it."""


@contextlib.contextmanager
def engine(speculative: dict[str, Any] | None = None, **settings: Any) -> Iterator[Any]:
    """An ``LLM`` inside this process, shut down at the end.

    ``speculative`` is the ``speculative_config``; ``settings`` override
    ``CPU_SETTINGS``.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm_mtp import compat
    from vllm_mtp.attention.base import TREE_BACKENDS, set_state

    merged = {"model": str(MODEL), **CPU_SETTINGS, **settings}
    if torch.cuda.is_available():
        # The KV pool is sized in bytes; this is only looked at when vLLM starts, and
        # lets several engines share a GPU.
        merged.setdefault("gpu_memory_utilization", 0.1)
    try:
        llm = LLM(speculative_config=speculative, **merged)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
    finally:
        # Also where the start failed: the next engine in this process finds nothing.
        compat.remove_backends(TREE_BACKENDS)
        set_state(None)
        gc.collect()
        cleanup_dist_env_and_memory()


def runner_of(llm: Any) -> Any:
    """The model runner inside an in-process engine."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def generate(llm: Any, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """Token ids generated for each prompt of token ids."""
    inputs = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's ``spec_decode`` counters, without their prefix and without zero tails."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if not metric.name.startswith("vllm:spec_decode_"):
            continue
        name = metric.name.removeprefix("vllm:spec_decode_")
        values = getattr(metric, "values", None)
        found[name] = getattr(metric, "value", None)
        if values is not None:
            found[name] = [v for v in values if v]
    return found
