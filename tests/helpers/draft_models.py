"""Load a draft model as a worker does, without an engine around it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.checkpoints import make_config

NUM_EXPERTS = make_config()["n_routed_experts"]
PREFIX = "model.layers.2."
BLOCK = f"{PREFIX}mtp_block."
EXPERTS = f"{BLOCK}mlp.experts.routed_experts."


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A tensor-parallel group of this process alone, taken down at the end."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    if not torch.accelerator.is_available():
        # vLLM's CPU worker does the same.
        torch.accelerator.empty_cache = lambda: None
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


def make_vllm_config(target: Path, draft: Path | None = None, **settings: Any) -> Any:
    """The engine's config for a target and, unless None, a draft folder."""
    from vllm.engine.arg_utils import EngineArgs

    speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    if draft is not None:
        speculative["model"] = str(draft)
    defaults = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "attention_backend": "CPU_MLA",
        "max_model_len": 128,
        "skip_tokenizer_init": True,
    }
    arguments = EngineArgs(
        model=str(target), speculative_config=speculative, **(defaults | settings)
    )
    return arguments.create_engine_config()


class TargetStub(nn.Module):
    """Of the target only what a draft shares: the embedding and the head."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size)
        self.lm_head = ParallelLMHead(vocab_size, hidden_size)


def load_draft(target: Path, draft: Path | None = None, **settings: Any) -> nn.Module:
    """The draft model, loaded through ``load_mtp_layer``. Needs ``one_rank``.

    Its parameters stay as they were read: vLLM's packing for the CPU's kernels, which
    empties them, is left out. Nothing is computed, so FP8 layers load on a CPU without
    AMX too, where vLLM has no kernel to run them.
    """
    from unittest.mock import patch

    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
        CPUFp8BlockScaledMMKernel,
    )
    from vllm.model_executor.model_loader import base_loader

    from vllm_mtp.models import load_mtp_layer

    vllm_config = make_vllm_config(target, draft, **settings)
    hf_config = vllm_config.model_config.hf_config
    with set_current_vllm_config(vllm_config):
        before = torch.get_default_dtype()
        torch.set_default_dtype(vllm_config.model_config.dtype)
        try:
            stub = TargetStub(hf_config.vocab_size, hf_config.hidden_size)
        finally:
            torch.set_default_dtype(before)
        with (
            patch.object(base_loader, "process_weights_after_loading"),
            patch.object(CPUFp8BlockScaledMMKernel, "is_supported", supported),
        ):
            model: nn.Module = load_mtp_layer(stub, vllm_config)
    model.target_stub = [stub]
    return model


def supported(compute_capability: int | None = None) -> tuple[bool, str | None]:
    """What a kernel class of vLLM answers where it can run."""
    return True, None


def layer_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The loaded layer's parameters, without the shared embedding and head."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if "embed_tokens" not in name and "head.head" not in name
        if not name.startswith("lm_head")
    }


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtype of each weight that can be quantised, by module."""
    return {
        name.removeprefix(BLOCK).removesuffix(".weight"): parameter.dtype
        for name, parameter in layer_parameters(model).items()
        if name.startswith(BLOCK)
        and name.endswith(("_proj.weight", "w13_weight", "w2_weight"))
    }


def assert_holds(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """The loaded parameters are the stored tensors, joined as vLLM joins them."""
    found = layer_parameters(model)

    def same(parameter: str, *names: str) -> None:
        expected = torch.cat([tensors[PREFIX + name] for name in names])
        assert equal(found[parameter], expected), parameter

    attention = "self_attn."
    for last in ("weight", "weight_scale_inv"):
        if f"{PREFIX}{attention}o_proj.{last}" not in tensors:
            continue
        same(
            f"{BLOCK}{attention}fused_qkv_a_proj.{last}",
            f"{attention}q_a_proj.{last}",
            f"{attention}kv_a_proj_with_mqa.{last}",
        )
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            same(f"{BLOCK}{attention}{name}.{last}", f"{attention}{name}.{last}")
        shared = "mlp.shared_experts."
        same(
            f"{BLOCK}{shared}gate_up_proj.{last}",
            f"{shared}gate_proj.{last}",
            f"{shared}up_proj.{last}",
        )
        for expert in range(NUM_EXPERTS):
            stored = f"{PREFIX}mlp.experts.{expert}."
            gate_up = [
                tensors[f"{stored}{part}_proj.{last}"] for part in ("gate", "up")
            ]
            down = tensors[f"{stored}down_proj.{last}"]
            assert equal(found[f"{EXPERTS}w13_{last}"][expert], torch.cat(gate_up))
            assert equal(found[f"{EXPERTS}w2_{last}"][expert], down)
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
        same(f"{PREFIX}{name}.weight", f"{name}.weight")
    for name in ("input_layernorm.weight", "mlp.gate.e_score_correction_bias"):
        same(f"{BLOCK}{name}", name)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.view(torch.uint8))


def assert_same_parameters(left: nn.Module, right: nn.Module) -> None:
    """Two loaded layers are equal bit for bit."""
    ours, theirs = layer_parameters(left), layer_parameters(right)
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert equal(parameter, theirs[name].contiguous()), name
