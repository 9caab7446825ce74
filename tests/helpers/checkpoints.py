"""Synthetic checkpoints: DeepSeek-V3's tensor names and dtypes, its shapes shrunk."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 128
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

KEPT_PLAIN = ("norm", "embed_tokens", "head", "eh_proj", "mlp.gate.")
"""Parts of the names that DeepSeek's FP8 checkpoints leave in bfloat16 or float32."""


def make_config(**changes: Any) -> dict[str, Any]:
    """The config of a model that vLLM's CPU attention can run."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 1024,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    } | changes


def quantize(weight: Tensor, block_rows: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Weight -> float8_e4m3 and ``weight_scale_inv`` of blocks of 128 columns."""
    rows, columns = weight.shape
    scales = torch.ones(-(-rows // block_rows), -(-columns // BLOCK))
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (
                slice(i * block_rows, (i + 1) * block_rows),
                slice(j * BLOCK, (j + 1) * BLOCK),
            )
            part = weight[at].float()
            scales[i, j] = part.abs().max().clamp(min=1e-6) / 448
            out[at] = (part / scales[i, j]).to(torch.float8_e4m3fn)
    return out, scales


def make_layer(config: dict[str, Any], index: int, is_mtp: bool) -> dict[str, Tensor]:
    """One decoder or MTP layer in bfloat16, under its full names."""
    generator = torch.Generator().manual_seed(1000 + index)

    def weight(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator) * 0.05
        return values.to(torch.bfloat16)

    def norm(size: int) -> Tensor:
        return 1 + weight(size)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    q_rank, kv_rank, value = (
        config[key] for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim")
    )
    tensors = {
        "input_layernorm": norm(hidden),
        "post_attention_layernorm": norm(hidden),
        "self_attn.kv_a_proj_with_mqa": weight(kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm": norm(kv_rank),
        "self_attn.kv_b_proj": weight(heads * (nope + value), kv_rank),
        "self_attn.o_proj": weight(hidden, heads * value),
    }
    if q_rank is None:
        tensors["self_attn.q_proj"] = weight(heads * (nope + rope), hidden)
    else:
        tensors["self_attn.q_a_proj"] = weight(q_rank, hidden)
        tensors["self_attn.q_a_layernorm"] = norm(q_rank)
        tensors["self_attn.q_b_proj"] = weight(heads * (nope + rope), q_rank)
    mlps = {"mlp": config["intermediate_size"]}
    if is_mtp or index >= config["first_k_dense_replace"]:
        width = config["moe_intermediate_size"]
        experts = config["n_routed_experts"]
        mlps = {f"mlp.experts.{expert}": width for expert in range(experts)}
        mlps["mlp.shared_experts"] = width * config["n_shared_experts"]
        tensors["mlp.gate"] = weight(experts, hidden)
        bias = torch.randn(experts, generator=generator) * 0.05
        tensors["mlp.gate.e_score_correction_bias"] = bias
    for name, width in mlps.items():
        tensors[f"{name}.gate_proj"] = weight(width, hidden)
        tensors[f"{name}.up_proj"] = weight(width, hidden)
        tensors[f"{name}.down_proj"] = weight(hidden, width)
    if is_mtp:
        tensors |= {"enorm": norm(hidden), "hnorm": norm(hidden)}
        tensors["eh_proj"] = weight(hidden, 2 * hidden)
        tensors["shared_head.norm"] = norm(hidden)
    return {
        f"model.layers.{index}.{name}"
        + ("" if name.endswith("_bias") else ".weight"): (tensor)
        for name, tensor in tensors.items()
    }


def to_fp8(tensors: dict[str, Tensor], block_rows: int = BLOCK) -> dict[str, Tensor]:
    """The same tensors as DeepSeek's FP8 checkpoints store them."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(part in name for part in KEPT_PLAIN):
            result[name] = tensor
        else:
            quantized = quantize(tensor, block_rows)
            result[name], result[f"{name}_scale_inv"] = quantized
    return result


def make_model(
    config: dict[str, Any],
    fp8: bool = False,
    mtp_fp8: bool | None = None,
    mtp_layers: int = 1,
) -> dict[str, Tensor]:
    """A whole checkpoint's tensors; the MTP layer is FP8 like the rest unless told."""
    generator = torch.Generator().manual_seed(7)
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    embedding, head = (
        torch.randn(vocabulary, hidden, generator=generator).to(torch.bfloat16) * scale
        for scale in (1.0, 0.1)
    )
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    first = config["num_hidden_layers"]
    for index in range(first):
        layer = make_layer(config, index, is_mtp=False)
        tensors |= to_fp8(layer) if fp8 else layer
    for index in range(first, first + mtp_layers):
        layer = make_layer(config, index, is_mtp=True)
        tensors |= to_fp8(layer) if (fp8 if mtp_fp8 is None else mtp_fp8) else layer
        prefix = f"model.layers.{index}."
        tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
        tensors[f"{prefix}shared_head.head.weight"] = head.clone()
    return tensors


def save_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 3
) -> Path:
    """Write a checkpoint folder; the tensors go round the shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder, config)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def save_nextn(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    index: int = 0,
    own: bool = False,
) -> Path:
    """Write a model's MTP layer as a NextN folder, without the code under test.

    ``index`` is the layer's in the folder; ``own`` keeps its embedding and head.
    """
    prefix = f"model.layers.{config['num_hidden_layers']}."
    layer = {
        name.replace(prefix, f"model.layers.{index}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
        and (own or not name.endswith(("embed_tokens.weight", "head.weight")))
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(layer, folder / "nextn.safetensors", metadata={"format": "pt"})
    nextn = {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    write_config(folder, config | nextn)
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``."""
    (folder / "config.json").write_text(json.dumps(config))


INT4_GROUP = 128
INT4_CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": INT4_GROUP,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": INT4_GROUP,
        "desc_act": False,
        "sym": True,
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": INT4_GROUP,
                },
            }
        },
    },
}


def to_int4(
    tensors: dict[str, Tensor], method: str, part: str = "proj"
) -> dict[str, Tensor]:
    """Random 4-bit weights in the form of a method, for modules named ``part``."""
    generator = torch.Generator().manual_seed(4)

    def packed(*shape: int) -> Tensor:
        low, high = -(2**31), 2**31 - 1
        values = torch.randint(low, high, shape, generator=generator)
        return values.to(torch.int32)

    def scales(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 0.01

    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kept = any(word in name for word in KEPT_PLAIN)
        if part not in name or tensor.dim() != 2 or kept:
            result[name] = tensor
            continue
        module = name.removesuffix("weight")
        out, size = tensor.shape
        groups = size // INT4_GROUP
        if method == "awq":
            new = {
                "qweight": packed(size, out // 8),
                "qzeros": packed(groups, out // 8),
                "scales": scales(groups, out).half(),
            }
        elif method == "gptq":
            new = {
                "qweight": packed(size // 8, out),
                "qzeros": torch.full((groups, out // 8), 0x77777777).to(torch.int32),
                "scales": scales(groups, out).half(),
                "g_idx": (torch.arange(size) // INT4_GROUP).to(torch.int32),
            }
        else:
            new = {
                "weight_packed": packed(out, size // 8),
                "weight_scale": scales(out, groups).bfloat16(),
                "weight_shape": torch.tensor([out, size]),
            }
        result |= {module + last: value for last, value in new.items()}
    return result
