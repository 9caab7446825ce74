"""Says what a folder of weights holds and what ``mtp_tree`` will do with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mtp.checkpoint.compare import check_config_fields, max_positions
from vllm_mtp.checkpoint.folder import Checkpoint, open_checkpoint
from vllm_mtp.checkpoint.layer import StoredLayer, block_size, examine_layer
from vllm_mtp.checkpoint.layout import EMBEDDING, HEAD, find_mtp_layers
from vllm_mtp.checkpoint.safetensors_file import CheckpointError
from vllm_mtp.checkpoint.validate import (
    COUNT,
    check_draft_folder,
    check_embedded_layer,
)


@dataclass(frozen=True)
class LayerSummary:
    """One stored MTP layer in plain values."""

    index: int
    num_tensors: int
    nbytes: int
    precision: str
    own_embedding: bool
    own_head: bool
    missing: list[str]
    faults: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class Inspection:
    """What a folder holds, in plain values (``vllm-mtp inspect --json``)."""

    path: str
    kind: str
    architectures: list[str]
    model_type: str | None
    num_hidden_layers: int | None
    num_nextn_predict_layers: Any
    max_positions: int | None
    quantization_method: str | None
    num_files: int
    num_tensors: int
    nbytes: int
    usable: bool

    verdict: str
    """What ``mtp_tree`` does with it, or why it refuses."""

    layers: list[LayerSummary] = field(default_factory=list)


def inspect_folder(folder: Path | str) -> Inspection:
    """Read a folder's headers and say what it holds.

    Raises:
        CheckpointError: if the folder cannot be read at all: no config, or a broken or
            missing file.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    usable, verdict = _judge(checkpoint)
    layers = find_mtp_layers(checkpoint)
    return Inspection(
        path=str(checkpoint.path),
        kind=_name_kind(checkpoint, bool(layers)),
        architectures=[str(name) for name in config.get("architectures") or []],
        model_type=config.get("model_type"),
        num_hidden_layers=config.get("num_hidden_layers"),
        num_nextn_predict_layers=config.get(COUNT),
        max_positions=max_positions(config),
        quantization_method=checkpoint.quantization_config.get("quant_method"),
        num_files=len({entry.file for entry in checkpoint.tensors.values()}),
        num_tensors=len(checkpoint.tensors),
        nbytes=sum(entry.nbytes for entry in checkpoint.tensors.values()),
        usable=usable,
        verdict=verdict,
        layers=_summarize_layers(checkpoint, layers),
    )


def _name_kind(checkpoint: Checkpoint, has_layers: bool) -> str:
    if checkpoint.is_nextn_folder:
        return "NextN folder"
    if "model.embed_tokens.weight" in checkpoint.tensors:
        return f"model {'with' if has_layers else 'without'} an MTP layer"
    return "draft folder" if has_layers else "unknown"


def _judge(checkpoint: Checkpoint) -> tuple[bool, str]:
    """Return whether ``mtp_tree`` accepts a folder, and its reason or its plan."""
    config = checkpoint.config
    is_target = "model.embed_tokens.weight" in checkpoint.tensors
    try:
        check_config_fields(checkpoint.path, checkpoint.config)
        if is_target and not checkpoint.is_nextn_folder:
            plan = check_embedded_layer(checkpoint, config, config.get(COUNT))
            return True, f"drafts with {plan.describe()}"
        plan = check_draft_folder(checkpoint, config)
    except CheckpointError as error:
        return False, f"refuses: {error}"
    return True, f'as "model" in --speculative-config: drafts with {plan.describe()}'


def _summarize_layers(
    checkpoint: Checkpoint, layers: Mapping[int, Mapping[str, Any]]
) -> list[LayerSummary]:
    try:
        check_config_fields(checkpoint.path, checkpoint.config)
    except CheckpointError:
        return []
    block = block_size(checkpoint.quantization_config)
    return [
        _summarize(
            examine_layer(checkpoint.path, index, tensors, checkpoint.config, block)
        )
        for index, tensors in layers.items()
    ]


def _summarize(layer: StoredLayer) -> LayerSummary:
    return LayerSummary(
        index=layer.index,
        num_tensors=len(layer.tensors),
        nbytes=layer.nbytes,
        precision=layer.precision,
        own_embedding=layer.has(EMBEDDING),
        own_head=layer.has(HEAD),
        missing=list(layer.missing),
        faults=list(layer.faults),
        unexpected=list(layer.unexpected),
    )
