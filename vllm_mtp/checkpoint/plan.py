"""Decides how an MTP layer is loaded: each module as it is stored on disk.

vLLM gives the draft layer the target's quantisation, so a layer that was left in
bfloat16 fails on missing scales, and a quantised layer beside a plain target fails on
scales too many. The plan made here follows the tensors instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_mtp.checkpoint.layer import StoredLayer, block_size
from vllm_mtp.checkpoint.layout import EMBEDDING, HEAD
from vllm_mtp.checkpoint.packed import find_packed_faults
from vllm_mtp.checkpoint.precision import Storage
from vllm_mtp.checkpoint.safetensors_file import CheckpointError

FUSED = {
    "self_attn.fused_qkv_a_proj": (
        "self_attn.q_a_proj",
        "self_attn.kv_a_proj_with_mqa",
    ),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.gate_up_proj": (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
}
"""vLLM's module -> the stored modules it joins; they need one form of storage."""

EXPERTS = "mlp.experts"

ALWAYS_PLAIN = ("eh_proj",)
"""Modules that vLLM builds unquantised whatever the config says."""

DEQUANTIZABLE = (Storage.FP8_BLOCK,)


@dataclass(frozen=True)
class LoadPlan:
    """How one stored MTP layer becomes vLLM's draft layer."""

    layer: StoredLayer

    quantized: dict[str, Storage]
    """vLLM's modules that are built quantised, relative to the layer."""

    dequantized: frozenset[str]
    """Stored modules whose FP8 weights become plain while they are loaded."""

    block: tuple[int, int]

    is_separate: bool
    """Whether the layer comes from a folder of its own."""

    own: frozenset[str] = frozenset()
    """Of the embedding and head, those that the draft keeps to itself."""

    @property
    def storage(self) -> Storage | None:
        """The form of storage of all quantised modules; None if there is none."""
        return next(iter(self.quantized.values()), None)

    def with_own(self, own: frozenset[str]) -> "LoadPlan":
        """Return the plan with copies of the embedding or head kept."""
        return replace(self, own=own)

    def is_quantized(self, module: str) -> bool:
        """Whether vLLM's module of this relative name is built quantised."""
        return any(
            module == name or module.startswith(f"{name}.") for name in self.quantized
        )

    @property
    def skipped(self) -> frozenset[str]:
        """Stored tensors that are not loaded."""
        shared = {name for name in (EMBEDDING, HEAD) if name not in self.own}
        stored = self.layer.tensors.keys()
        return frozenset(stored & shared | set(self.layer.unexpected))

    def describe(self) -> str:
        """One line for the log and for ``vllm-mtp inspect``."""
        own = [name.split(".")[0] for name in (EMBEDDING, HEAD) if name in self.own]
        sharing = "embedding and head shared with the target"
        if own:
            sharing = f"its own copy of {' and '.join(own)} kept"
        text = (
            f"layer {self.layer.index} ({self.layer.precision}, "
            f"{self.layer.nbytes / 2**20:,.1f} MiB stored), {sharing}"
        )
        if self.dequantized:
            text += f", {len(self.dequantized)} modules dequantised while loading"
        return text

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that differ when the built layer differs."""
        return {
            "quantized": {name: str(kind) for name, kind in self.quantized.items()},
            "block": list(self.block),
            "own": sorted(self.own),
        }


def plan_load(
    layer: StoredLayer,
    quantization_config: Mapping[str, Any],
    is_separate: bool,
) -> LoadPlan:
    """Return how a complete layer is loaded.

    Args:
        layer: complete, see ``StoredLayer.check_complete``.
        quantization_config: of the folder that the layer is stored in.
        is_separate: whether that is another folder than the target's.

    Raises:
        CheckpointError: if modules that vLLM joins are stored in forms that cannot be
            joined, if no one way of reading fits all quantised modules, or if the
            config does not describe their packed tensors.
    """
    quantized: dict[str, Storage] = {}
    dequantized: set[str] = set()
    for module, stored in _group_modules(layer).items():
        kinds = {layer.storages[name] for name in stored}
        if kinds == {Storage.PLAIN}:
            continue
        if len(kinds) == 1 and module not in ALWAYS_PLAIN:
            quantized[module] = kinds.pop()
            continue
        for name in stored:
            kind = layer.storages[name]
            if kind is Storage.PLAIN:
                continue
            if kind not in DEQUANTIZABLE:
                raise CheckpointError(
                    f"the MTP layer's {name} is stored as {kind}, but {module} has to "
                    f"be plain, or of one form with {', '.join(stored[:3])}. Quantise "
                    "all of these alike, or leave the MTP layer unquantised."
                )
            dequantized.add(name)
    kinds = set(quantized.values())
    if len(kinds) > 1 and Storage.FP8_BLOCK in kinds:
        raise CheckpointError(
            "the MTP layer mixes quantised forms that one layer cannot have together: "
            f"{', '.join(sorted(kinds))}. Quantise it in one form, or leave it "
            "unquantised."
        )
    faults = find_packed_faults(layer, quantization_config)
    if faults:
        raise CheckpointError(
            f"the quantization_config of {layer.folder} does not fit its MTP layer: "
            f"{'; '.join(faults[:3])}"
            + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
            + ". Correct it in config.json, or name a NextN folder with a config of "
            'its own with "model" in --speculative-config.'
        )
    return LoadPlan(
        layer,
        quantized,
        frozenset(dequantized),
        block_size(quantization_config),
        is_separate,
    )


def _group_modules(layer: StoredLayer) -> dict[str, tuple[str, ...]]:
    """Return vLLM's module -> the stored modules it is made of."""
    groups: dict[str, list[str]] = {}
    owners = {part: fused for fused, parts in FUSED.items() for part in parts}
    for name in layer.storages:
        is_expert = name.startswith(f"{EXPERTS}.")
        groups.setdefault(EXPERTS if is_expert else owners.get(name, name), [])
        groups[EXPERTS if is_expert else owners.get(name, name)].append(name)
    return {module: tuple(names) for module, names in groups.items()}
