"""The widened tiny model in 4-bit checkpoints: rounded to nearest, group by group.

``checkpoints.to_int4`` makes random weights of the same names and shapes; here they are
the trained model's, so that it still says what it said and its drafts are accepted.
"""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.checkpoints import INT4_CONFIGS, INT4_GROUP, KEPT_PLAIN, save_model
from tests.helpers.engine import MODEL
from tests.helpers.fp8_tiny import TOKENIZER_FILES, load_widened

METHODS = tuple(INT4_CONFIGS)
EXPERTS = ".mlp.experts."
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each nibble of AWQ's words holds."""


def pack(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight values from 0 to 15 along ``dim`` -> one int32, the lowest bits first."""
    last = values.movedim(dim, -1).unflatten(-1, (-1, 8))[..., list(order)].long()
    words = (last << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def round_weight(weight: Tensor, asymmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weight `[out, in]` -> codes 0..15 of its shape, scales and zeros `[out, groups]`.

    A weight is ``scale * (code - zero)``; zero weights stay zero.
    """
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))
    if asymmetric:
        low = groups.amin(-1).clamp(max=0)
        scales = ((groups.amax(-1).clamp(min=0) - low) / 15).clamp(min=1e-4)
        zeros = (-low / scales).round()
    else:
        scales = (groups.abs().amax(-1) / 7.5).clamp(min=1e-4)
        zeros = torch.full_like(scales, 8)
    scales = scales.half()
    codes = groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)
    return codes.round().clamp(0, 15).flatten(1).int(), scales, zeros.int()


def quantize_module(weight: Tensor, method: str) -> dict[str, Tensor]:
    """A linear layer's weight as the method stores it, by the last part of the name."""
    codes, scales, zeros = round_weight(weight, method == "awq")
    out, size = weight.shape
    if method == "awq":
        return {
            "qweight": pack(codes.T, 1, AWQ_ORDER),
            "qzeros": pack(zeros.T, 1, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
    if method == "gptq":
        return {
            "qweight": pack(codes.T, 0),
            # Stored less one; symmetric kernels take 8 for granted.
            "qzeros": pack(zeros.T - 1, 1),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(size) // INT4_GROUP).to(torch.int32),
        }
    return {
        "weight_packed": pack(codes, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, size]),
    }


def int4_config(method: str, experts: bool) -> dict[str, Any]:
    """The method's ``quantization_config``; without ``experts`` it leaves them out."""
    config = copy.deepcopy(INT4_CONFIGS[method])
    if experts:
        return config
    if method == "awq":
        # Matched as a part of names. "mlp.experts" is none of the shared experts'.
        return config | {"modules_to_not_convert": ["mlp.experts", "lm_head"]}
    if method == "gptq":
        return config | {"dynamic": {r"-:.*\.mlp\.experts.*": {}}}
    return config | {"ignore": ["lm_head", r"re:.*\.mlp\.experts\..*"]}


def save_int4(
    folder: Path,
    method: str,
    *,
    mtp_int4: bool,
    experts: bool,
    spoil: Callable[[str, Tensor], Tensor] | None = None,
) -> Path:
    """Write the widened model with 4-bit linear layers and float16 for the rest.

    Args:
        folder: to write.
        method: one of ``METHODS``.
        mtp_int4: whether the MTP layer is 4-bit too; else it is left in bfloat16.
        experts: whether routed experts are 4-bit; else they stay plain.
        spoil: changes stored tensors of the MTP layer, by their name in it.
    """
    config, tensors = load_widened()
    prefix = f"model.layers.{config['num_hidden_layers']}."
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_mtp = name.startswith(prefix)
        kept = any(part in name for part in KEPT_PLAIN) or tensor.dim() != 2
        if is_mtp and not mtp_int4:
            stored[name] = tensor
        elif kept or (EXPERTS in name and not experts):
            stored[name] = tensor.half() if tensor.dtype == torch.bfloat16 else tensor
        else:
            module = name.removesuffix("weight")
            parts = quantize_module(tensor, method)
            stored |= {module + last: value for last, value in parts.items()}
    if spoil is not None:
        for name in [name for name in stored if name.startswith(prefix)]:
            stored[name] = spoil(name.removeprefix(prefix), stored[name])
    config |= {
        "torch_dtype": "float16",
        "quantization_config": int4_config(method, experts),
    }
    save_model(folder, config, stored)
    for name in TOKENIZER_FILES:
        shutil.copyfile(MODEL / name, folder / name)
    return folder
