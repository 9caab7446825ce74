"""Feeds one MTP layer's tensors to vLLM's model and checks that all of them arrived."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from vllm_mtp.checkpoint.layout import layer_name, split_layer_name, summarize_names
from vllm_mtp.checkpoint.plan import LoadPlan
from vllm_mtp.config import SettingsError

SCALE = "weight_scale_inv"

UNUSED = ".g_idx"
"""GPTQ's activation order, which vLLM's kernels do not use and its MTP model lacks.

Source: vLLM 0.32 and 0.33, QuantizationConfig.get_checkpoint_weight_mapper."""

NOT_STORED = (
    "k_scale",
    "v_scale",
    "q_scale",
    "prob_scale",
    "input_scale_ub",
    "w13_bias",
    "w2_bias",
)
"""Last names of parameters that checkpoints need not hold: vLLM has defaults, or, for
the biases of 4-bit experts, drops them when none was loaded."""

MAY_BE_ZERO = ("bias", "scale", "zero", "qzeros", "g_idx", "shape")
"""Parts of names of tensors that are zero in sound checkpoints too."""


class LayerStream:
    """Turns a folder's tensors into those of one layer, renamed and dequantised."""

    def __init__(self, plan: LoadPlan, target_index: int) -> None:
        self.plan = plan
        self.target_index = target_index
        self.seen: set[str] = set()
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def read(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to load under the target's layer index."""
        for full_name, tensor in weights:
            parts = split_layer_name(full_name)
            if parts is None or parts[0] != self.plan.layer.index:
                continue
            name = parts[1]
            self.seen.add(name)
            if name in self.plan.skipped or name.endswith(UNUSED):
                continue
            _refuse_zeros(full_name, tensor)
            module, _, last = name.rpartition(".")
            if module in self.plan.dequantized:
                pair = self._waiting.setdefault(module, {})
                pair[last] = tensor
                if not {"weight", SCALE} <= pair.keys():
                    continue
                del self._waiting[module]
                name = f"{module}.weight"
                tensor = dequantize(pair["weight"], pair[SCALE], self.plan.block)
            yield layer_name(self.target_index, name), tensor

    def check_all_read(self) -> None:
        """Raise ``SettingsError`` if a tensor of the layer never came.

        Experts are left out: with expert parallelism vLLM reads a rank's own only.
        """
        layer = self.plan.layer
        expected = layer.tensors.keys() - self.plan.skipped
        missing = [
            layer_name(layer.index, name)
            for name in expected - self.seen
            if ".experts." not in name
        ]
        if missing:
            raise SettingsError(
                f"mtp_tree: the files of {layer.folder} changed while they were "
                f"loaded; not read: {summarize_names(sorted(missing))}. Start again."
            )


def _refuse_zeros(name: str, tensor: torch.Tensor) -> None:
    last = name.rpartition(".")[2]
    if any(part in last for part in MAY_BE_ZERO) or ".experts." in name:
        return
    bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    if tensor.numel() and not bool(bits.any()):
        raise SettingsError(
            f"mtp_tree: {name} holds nothing but zeros, so the MTP layer was never "
            "filled in. Take a checkpoint whose MTP layer was trained and saved."
        )


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """Return an FP8 weight in float32.

    Args:
        weight: `[rows, columns]`, float8_e4m3.
        scale: `[ceil(rows / block[0]), ceil(columns / block[1])]`.
        block: rows and columns that share a scale.
    """
    rows, columns = weight.shape
    spread = scale.float().repeat_interleave(block[0], 0)[:rows]
    spread = spread.repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * spread


def check_parameters(model: nn.Module, loaded: set[str]) -> None:
    """Raise ``SettingsError`` if a parameter was not loaded from the checkpoint."""
    missing = [
        name
        for name, parameter in model.named_parameters()
        if name not in loaded
        and parameter.numel() > 0
        and name.rpartition(".")[2] not in NOT_STORED
        and "g_idx" not in name
    ]
    if missing:
        raise SettingsError(
            f"mtp_tree: {len(missing)} parameters of the MTP layer were not in the "
            f"checkpoint: {summarize_names(missing)}. Run vllm-mtp inspect on it."
        )
