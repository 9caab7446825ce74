"""The quantisation config of the draft layer, made from what is on disk."""

import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_mtp.checkpoint.plan import FUSED, LoadPlan
from vllm_mtp.checkpoint.precision import Storage
from vllm_mtp.config import SettingsError

JOINED = {
    fused.rpartition(".")[2]: [part.rpartition(".")[2] for part in parts]
    for fused, parts in FUSED.items()
}
"""vLLM's joined modules, by the last part of their names."""

SKIP_LISTS = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
)
"""Attributes of vLLM's configs that name modules to leave plain, or, the last, all to
quantise; empty means that nothing is left out."""


def build_quant_config(
    vllm_config: VllmConfig, plan: LoadPlan
) -> QuantizationConfig | None:
    """Return the quantisation config for the draft layer; None for a plain layer.

    A layer that is stored plain stays so under online quantisation only if nothing
    asked for it: ``--quantization`` on a plain checkpoint quantises the draft too, as
    vLLM does.
    """
    target: QuantizationConfig | None = vllm_config.quant_config
    if plan.storage is None:
        return target if _is_online(vllm_config) else None
    base = _base_config(vllm_config, plan)
    _check_activation_dtype(base, vllm_config.model_config.dtype, plan)
    return follow_tensors(base, plan, vllm_config.model_config.hf_config)


def _is_online(vllm_config: VllmConfig) -> bool:
    """Whether vLLM quantises a plain checkpoint while it loads it."""
    declared = vllm_config.model_config.hf_config
    keys = ("quantization_config", "compression_config")
    return vllm_config.quant_config is not None and not any(
        getattr(declared, key, None) for key in keys
    )


def _base_config(vllm_config: VllmConfig, plan: LoadPlan) -> QuantizationConfig:
    """Return a config that can read the quantised modules' form of storage."""
    target = vllm_config.quant_config
    if plan.storage is Storage.FP8_BLOCK:
        block = list(plan.block)
        if isinstance(target, Fp8Config) and target.weight_block_size == block:
            base = copy.copy(target)
            base.ignored_layers = []
            return base
        return Fp8Config(weight_block_size=block)
    base = target
    if plan.is_separate:
        spec = vllm_config.speculative_config
        base = VllmConfig.get_quantization_config(
            spec.draft_model_config, vllm_config.load_config
        )
    if base is None:
        raise SettingsError(
            f"mtp_tree: the MTP layer of {plan.layer.folder} is stored as "
            f"{plan.storage}, but the config there declares no quantization_config to "
            "read it with. Add it, or use a layer in FP8 blocks or bfloat16."
        )
    return base


def _check_activation_dtype(
    base: QuantizationConfig, dtype: Any, plan: LoadPlan
) -> None:
    supported = base.get_supported_act_dtypes()
    if dtype in supported:
        return
    names = ", ".join(str(item).removeprefix("torch.") for item in supported)
    raise SettingsError(
        f"mtp_tree: the MTP layer of {plan.layer.folder} is stored as {plan.storage}, "
        f"which vLLM runs with --dtype {names}, not {str(dtype).removeprefix('torch.')}"
        ". Change --dtype, or name a NextN folder written by vllm-mtp export with "
        "--dtype bfloat16."
    )


class _FollowsTensors:
    """Mixed into a quantisation config: modules stored plain are built plain."""

    _plan: LoadPlan
    _prefix: str

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return vLLM's method for modules stored quantised, else the plain one."""
        module = prefix.removeprefix(self._prefix)
        if self._plan.is_quantized(module):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, VocabParallelEmbedding):
            return None
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]


def follow_tensors(
    base: QuantizationConfig, plan: LoadPlan, hf_config: Any
) -> QuantizationConfig:
    """Return ``base`` with each module's method chosen by how it is stored.

    The result is an instance of ``base``'s class, as vLLM's own checks want it. Lists
    of modules that stayed plain go: they may contradict the tensors, and a NextN folder
    may have its source's, where layer 0 is another one.
    """
    kind = type(base)
    mixed = type(f"{kind.__name__}ByTensor", (_FollowsTensors, kind), {})
    result: Any = object.__new__(mixed)
    number = hf_config.num_hidden_layers
    for name, value in base.__dict__.items():
        result.__dict__[name] = _rename_layer(value, plan.layer.index, number)
    for name in SKIP_LISTS:
        if getattr(result, name, None):
            setattr(result, name, [])
    if isinstance(getattr(result, "dynamic", None), dict):
        rules = result.dynamic.items()
        result.dynamic = {k: v for k, v in rules if not k.startswith("-:")}
    # vLLM's own MTP model has no such table; it leans on the target's.
    result.packed_modules_mapping = base.packed_modules_mapping | JOINED
    result._plan = plan
    result._prefix = f"model.layers.{number}."
    return result


def _rename_layer(value: Any, stored: int, built: int) -> Any:
    """Return a list of module names with the folder's layer index made the target's."""
    if not isinstance(value, list) or stored == built:
        return value
    before, after = f"layers.{stored}.", f"layers.{built}."
    return [
        item.replace(before, after) if isinstance(item, str) else item for item in value
    ]
