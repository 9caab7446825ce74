"""Names and shapes: what a complete MTP layer of a DeepSeek-V3-like model consists of.

A checkpoint stores its MTP layer after the decoder layers, as ``model.layers.61.*`` of
DeepSeek-V3; a NextN folder stores it as ``model.layers.0.*`` or keeps the index. Inside
the layer the names are the same, so all code here works on names relative to it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_mtp.checkpoint.folder import Checkpoint
from vllm_mtp.checkpoint.safetensors_file import TensorEntry

LAYER_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
EXPERT_INDEX = re.compile(r"(?<=mlp\.experts\.)\d+(?=\.)")

NEXTN_ARCHITECTURE = "DeepseekV3ForCausalLMNextN"

MARKERS = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
"""Beginnings of names that only MTP layers have."""

EMBEDDING = "embed_tokens.weight"
HEAD = "shared_head.head.weight"

SHARED = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
"""A layer's copies of the target's embedding and head -> the target's names."""

IGNORED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Parts of names that a layer may hold besides, and that need no attention here."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a complete MTP layer needs."""

    name: str
    """Relative to the layer, as in an unquantised checkpoint."""

    shape: tuple[int, ...]

    can_be_quantized: bool = False
    """Whether quantised checkpoints may store it in another form."""

    @property
    def module(self) -> str:
        """The part of the name that belongs to the module."""
        return self.name.rpartition(".")[0]


def layer_name(index: int, name: str) -> str:
    """Return the full name of a layer's tensor."""
    return f"model.layers.{index}.{name}"


def split_layer_name(name: str) -> tuple[int, str] | None:
    """Inverse of ``layer_name``; None for a tensor that is in no layer."""
    match = LAYER_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def find_mtp_layers(
    checkpoint: Checkpoint, num_hidden_layers: int | None = None
) -> dict[int, dict[str, TensorEntry]]:
    """Return the stored MTP layers: index -> tensors by relative name.

    A layer is one if it holds a tensor that only MTP layers have, or lies beyond the
    decoder layers (their number is the config's unless given), or is in a NextN
    folder, which has no other layers.
    """
    layers: dict[int, dict[str, TensorEntry]] = {}
    for entry in checkpoint.tensors.values():
        parts = split_layer_name(entry.name)
        if parts is not None:
            layers.setdefault(parts[0], {})[parts[1]] = entry
    beyond = num_hidden_layers
    if beyond is None:
        beyond = checkpoint.config.get("num_hidden_layers")
    return {
        index: tensors
        for index, tensors in sorted(layers.items())
        if checkpoint.is_nextn_folder
        or (isinstance(beyond, int) and index >= beyond)
        or any(name.startswith(MARKERS) for name in tensors)
    }


def required_tensors(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Return what a complete MTP layer holds for a target's config, by relative name.

    The embedding and head are not among them: they are the target's, and a copy in the
    layer is optional.

    Source: DeepSeek-V3's README_WEIGHTS; vLLM 0.32, models/deepseek_v2.py and
    deepseek_mtp.py.
    """
    hidden = config["hidden_size"]
    specs = [
        TensorSpec("enorm.weight", (hidden,)),
        TensorSpec("hnorm.weight", (hidden,)),
        TensorSpec("eh_proj.weight", (hidden, 2 * hidden), True),
        TensorSpec("shared_head.norm.weight", (hidden,)),
        TensorSpec("input_layernorm.weight", (hidden,)),
        TensorSpec("post_attention_layernorm.weight", (hidden,)),
        *_attention_tensors(config, hidden),
        *_mlp_tensors(config, hidden),
    ]
    return {spec.name: spec for spec in specs}


def _attention_tensors(config: Mapping[str, Any], hidden: int) -> Iterable[TensorSpec]:
    heads = config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    value = config["v_head_dim"]
    linears = {
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }
    norms = {"kv_a_layernorm": (kv_rank,)}
    if q_rank is None:
        linears["q_proj"] = (heads * (nope + rope), hidden)
    else:
        linears["q_a_proj"] = (q_rank, hidden)
        linears["q_b_proj"] = (heads * (nope + rope), q_rank)
        norms["q_a_layernorm"] = (q_rank,)
    for name, shape in linears.items():
        yield TensorSpec(f"self_attn.{name}.weight", shape, True)
    for name, norm_shape in norms.items():
        yield TensorSpec(f"self_attn.{name}.weight", norm_shape)


def _mlp_tensors(config: Mapping[str, Any], hidden: int) -> Iterable[TensorSpec]:
    experts = config.get("n_routed_experts")
    if experts is None:
        yield from _gated_mlp("mlp", config["intermediate_size"], hidden)
        return
    yield TensorSpec("mlp.gate.weight", (experts, hidden))
    if config.get("topk_method") == "noaux_tc":
        yield TensorSpec("mlp.gate.e_score_correction_bias", (experts,))
    width = config["moe_intermediate_size"]
    for expert in range(experts):
        yield from _gated_mlp(f"mlp.experts.{expert}", width, hidden)
    shared = config.get("n_shared_experts")
    if shared:
        yield from _gated_mlp("mlp.shared_experts", shared * width, hidden)


def _gated_mlp(prefix: str, width: int, hidden: int) -> Iterable[TensorSpec]:
    yield TensorSpec(f"{prefix}.gate_proj.weight", (width, hidden), True)
    yield TensorSpec(f"{prefix}.up_proj.weight", (width, hidden), True)
    yield TensorSpec(f"{prefix}.down_proj.weight", (hidden, width), True)


def summarize_names(names: Iterable[str], limit: int = 6) -> str:
    """Join tensor names for a message, experts folded into one: ``experts.{0..7}``.

    Only the first ``limit`` are named; the rest is counted.
    """
    folded: dict[str, list[int]] = {}
    for name in names:
        match = EXPERT_INDEX.search(name)
        key = EXPERT_INDEX.sub("{}", name)
        folded.setdefault(key, []).extend([int(match[0])] if match else [])
    parts = []
    for key, experts in folded.items():
        parts.append(key.replace("{}", _fold_numbers(experts)) if experts else key)
    rest = len(parts) - limit
    return ", ".join(parts[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _fold_numbers(numbers: list[int]) -> str:
    """Return ``3``, ``{0..7}`` or ``{0,2,5,..}``."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    more = ",.." if len(ordered) > 4 else ""
    return f"{{{','.join(map(str, ordered[:4]))}{more}}}"
