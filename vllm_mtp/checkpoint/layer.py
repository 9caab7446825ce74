"""Holds a stored MTP layer against what its model needs, and says what is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mtp.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    IGNORED,
    TensorSpec,
    layer_name,
    required_tensors,
    summarize_names,
)
from vllm_mtp.checkpoint.precision import (
    DEFAULT_BLOCK,
    FLOAT_DTYPES,
    Storage,
    describe_shape_fault,
    describe_storage,
    examine_module,
)
from vllm_mtp.checkpoint.safetensors_file import CheckpointError, TensorEntry


@dataclass(frozen=True)
class StoredLayer:
    """An MTP layer as it was found on disk. Names are relative to the layer."""

    folder: Path

    index: int
    """Of the layer in its own folder."""

    tensors: dict[str, TensorEntry]
    required: dict[str, TensorSpec]

    storages: dict[str, Storage] = field(default_factory=dict)
    """Linear modules, ``eh_proj`` among them -> how their weight is stored."""

    missing: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    unexpected: tuple[str, ...] = ()
    """Tensors that are not part of an MTP layer; they are not loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def precision(self) -> str:
        """Its linear modules' precision in a few words."""
        modules = {k: v for k, v in self.storages.items() if k != "eh_proj"}
        return describe_storage(modules, self.tensors) if modules else "unknown"

    def has(self, name: str) -> bool:
        """Whether the layer has a tensor of this relative name."""
        return name in self.tensors

    def check_complete(self) -> None:
        """Raise ``CheckpointError`` naming what is missing or does not fit."""
        if self.missing:
            names = [layer_name(self.index, name) for name in self.missing]
            raise CheckpointError(
                f"the MTP layer (model.layers.{self.index}) of {self.folder} is "
                f"incomplete: {len(self.missing)} of its tensors are missing: "
                f"{summarize_names(names)}. A quantising or converting tool may have "
                "left them out. Take a checkpoint that holds them, or name a NextN "
                'folder with "model" in --speculative-config.'
            )
        if self.faults:
            raise CheckpointError(
                f"the MTP layer (model.layers.{self.index}) of {self.folder} does "
                f"not fit the model: {'; '.join(self.faults[:4])}"
                + (f"; and {len(self.faults) - 4} more" if len(self.faults) > 4 else "")
                + ". Take an MTP layer of the same model as the target."
            )


def examine_layer(
    folder: Path,
    index: int,
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    block: tuple[int, int] = DEFAULT_BLOCK,
) -> StoredLayer:
    """Return what is stored of an MTP layer, held against a target's ``config``.

    Args:
        folder: where the layer is stored.
        index: the layer's index there.
        tensors: its tensors, by name relative to the layer.
        config: the target's, see ``layout.required_tensors``.
        block: rows and columns that share a block scale.
    """
    required = required_tensors(config)
    vocabulary = (config["vocab_size"], config["hidden_size"])
    optional = {name: TensorSpec(name, vocabulary) for name in (EMBEDDING, HEAD)}
    storages: dict[str, Storage] = {}
    missing: list[str] = []
    faults: list[str] = []
    known: set[str] = set()
    for spec in [*required.values(), *optional.values()]:
        if spec.can_be_quantized:
            found = examine_module(spec, tensors, block)
            known.update(found.names)
            missing.extend(found.missing)
            faults.extend(found.faults)
            if found.storage is not None:
                storages[spec.module] = found.storage
            continue
        known.add(spec.name)
        if spec.name in tensors:
            faults.extend(_check_plain(spec, tensors[spec.name]))
        elif spec.name in required:
            missing.append(spec.name)
    unexpected = tuple(
        name
        for name in tensors
        if name not in known and not any(part in name for part in IGNORED)
    )
    return StoredLayer(
        folder,
        index,
        dict(tensors),
        required,
        storages,
        tuple(missing),
        tuple(faults),
        unexpected,
    )


def _check_plain(spec: TensorSpec, entry: TensorEntry) -> list[str]:
    if entry.shape != spec.shape:
        return [describe_shape_fault(spec.name, entry.shape, spec.shape)]
    if entry.dtype not in FLOAT_DTYPES:
        return [
            f"{spec.name} is stored as {entry.dtype} and should be one of "
            f"{', '.join(FLOAT_DTYPES)}"
        ]
    return []


def block_size(quantization_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the block of FP8 scales that a quantisation config declares."""
    value = quantization_config.get("weight_block_size")
    if isinstance(value, (list, tuple)) and len(value) == 2:
        rows, columns = value
        if isinstance(rows, int) and isinstance(columns, int) and min(value) > 0:
            return rows, columns
    return DEFAULT_BLOCK
