"""The trained tiny model widened so that FP8 blocks of 128 fit, in both precisions.

Its own sizes are no multiples of 128, which vLLM's joined FP8 weights need. Zero rows
and columns change nothing but the mean that RMSNorm divides by; the norms' weights are
scaled for that. So the widened model says what the tiny one says, up to rounding.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.checkpoints import FP8_CONFIG, save_model, to_fp8
from tests.helpers.engine import MODEL

WIDTHS = ("hidden_size", "q_lora_rank", "moe_intermediate_size", "intermediate_size")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def load_widened() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The widened model's config and bfloat16 tensors."""
    config = json.loads((MODEL / "config.json").read_text())
    before = {name: config[name] for name in WIDTHS}
    after = {name: math.ceil(size / 128) * 128 for name, size in before.items()}
    hidden = before["hidden_size"], after["hidden_size"]
    q_rank = before["q_lora_rank"], after["q_lora_rank"]
    sizes = {before[name]: after[name] for name in WIDTHS}
    if len(sizes) != len(WIDTHS):
        raise ValueError(f"two widths of the tiny model are equal: {before}")
    kept = {config["n_routed_experts"], config["vocab_size"]}
    result = {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        if "eh_proj" in name:
            halves = tensor.chunk(2, dim=1)
            tensor = torch.cat([_grow(half, (hidden[1],) * 2) for half in halves], 1)
        else:
            shape = tuple(
                size if size in kept else sizes.get(size, size) for size in tensor.shape
            )
            tensor = _grow(tensor, shape)
        if name.endswith("norm.weight") and "kv_a" not in name:
            small, big = q_rank if "q_a_layernorm" in name else hidden
            tensor = (tensor.float() * math.sqrt(small / big)).to(tensor.dtype)
        result[name] = tensor
    return config | after, result


def _grow(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    grown = torch.zeros(shape, dtype=tensor.dtype)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown


def save_widened(folder: Path, fp8: bool, mtp_fp8: bool | None = None) -> Path:
    """Write the widened model; the MTP layer is FP8 like the rest unless told."""
    config, tensors = load_widened()
    prefix = f"model.layers.{config['num_hidden_layers']}."
    mtp_fp8 = fp8 if mtp_fp8 is None else mtp_fp8
    layer = {k: v for k, v in tensors.items() if k.startswith(prefix)}
    rest = {k: v for k, v in tensors.items() if not k.startswith(prefix)}
    stored = to_fp8(rest) if fp8 else rest
    stored |= to_fp8(layer) if mtp_fp8 else layer
    if fp8:
        config = config | {"quantization_config": FP8_CONFIG}
    save_model(folder, config, stored)
    for name in TOKENIZER_FILES:
        shutil.copyfile(MODEL / name, folder / name)
    return folder
