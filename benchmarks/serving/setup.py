"""Engines of the inflated model: settings, tuned MoE tiles, noise in the KV cache."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.inflate import TINY, Inflation, Inflator
from benchmarks.serving import loader
from tests.helpers.engine import runner_of
from vllm_mtp.tuning.shapes import Shape

BLOCK = 64
"""Tokens of a KV block."""

KV_WIDTH = 576
"""Values of a token in the MLA cache of one layer."""

CPU_SHAPE = Inflation(
    num_hidden_layers=6,
    hidden_size=1536,
    vocab_size=2304,
    first_k_dense_replace=2,
    n_routed_experts=32,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    q_lora_rank=384,
    num_attention_heads=4,
    intermediate_size=512,
    moe_intermediate_size=128,
    weight_sets=1,
    skip_above=64,
)
"""Everything that the large model has, at a size that a CPU can try."""


@dataclass(frozen=True)
class Workload:
    """What an engine must hold: the largest batch and every prompt at once."""

    batches: Sequence[int]
    inputs: Sequence[int]
    num_prompts: int
    max_new_tokens: int

    @property
    def max_model_len(self) -> int:
        """Longest prompt and its new tokens, with room for a tree."""
        return max(self.inputs) + self.max_new_tokens + BLOCK

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all prompts and what they generate, in whole blocks."""
        spare = self.max_new_tokens + BLOCK
        blocks = sum(-(-(length + spare) // BLOCK) for length in self.inputs)
        return self.num_prompts * blocks * BLOCK


def write_model(folder: Path, shape: Inflation) -> None:
    """Write the model's folder, and let vLLM's MoE kernel use tiles that fit it.

    vLLM ships tiles tuned on an H200 for bfloat16 experts of the same width, but for
    512 experts; those for 256 it lacks.
    """
    Inflator(TINY, shape).write(folder)
    loader.register()
    if not torch.cuda.is_available():
        return
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        get_config_file_name,
        get_moe_configs,
    )

    width = shape.moe_intermediate_size
    tuned = get_moe_configs(512, width, None)
    name = get_config_file_name(shape.n_routed_experts, width, None)
    if tuned is not None:
        (folder / name).write_text(json.dumps(tuned))
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)


def llm_settings(
    folder: Path,
    shape: Inflation,
    speculation: Shape,
    workload: Workload,
    compiled: bool,
) -> dict[str, Any]:
    """Arguments of ``LLM`` beside the speculation itself."""
    batch = max(workload.batches)
    if torch.cuda.is_available() and batch * speculation.num_rows > shape.skip_above:
        raise ValueError(
            f"batch {batch} of {speculation.name} has more than {shape.skip_above} "
            "rows, so the added layers would be left out. Raise --skip-above."
        )
    settings: dict[str, Any] = {
        "model": str(folder),
        "load_format": loader.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "max_model_len": workload.max_model_len,
        "max_num_seqs": batch,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if not torch.cuda.is_available():
        return settings
    compilation: dict[str, Any] = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": speculation.capture_sizes(workload.batches),
    }
    if not compiled:
        compilation["mode"] = 0
    token_bytes = 2 * KV_WIDTH * (shape.num_hidden_layers + 1)
    return {
        **settings,
        "attention_backend": None,
        "dtype": "bfloat16",
        "enforce_eager": False,
        "max_num_batched_tokens": 8192,
        # Only looked at when the engine starts, since the KV cache's size is given.
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": workload.num_cached_tokens * token_bytes + (1 << 30),
        "compilation_config": compilation,
    }


def fill_cache(llm: Any) -> None:
    """Fill the KV cache with noise, which added layers then read where they wrote none.

    Zeros would be read faster than data.
    """
    context = runner_of(llm).vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        cache = getattr(layer, "kv_cache", None)
        if isinstance(cache, torch.Tensor) and cache.is_floating_point():
            cache.normal_()
