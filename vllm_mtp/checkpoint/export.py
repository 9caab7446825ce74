"""Writes the MTP layer of a checkpoint as a stand-alone NextN folder.

The layout is that of SGLang's NextN folders: the layer renamed to index 0, the
target's embedding and head left out, one safetensors file with an index, and a config
with one hidden layer and the architecture ``DeepseekV3ForCausalLMNextN``. Bytes go from
file to file without passing through memory, and the folder gets its name only when it
is complete.

Source: sgl-project/sglang, scripts/export_deepseek_nextn.py (the layout only).
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_mtp.checkpoint.compare import check_config_fields
from vllm_mtp.checkpoint.export_config import build_config, is_quantization_file
from vllm_mtp.checkpoint.folder import CONFIG_NAME, Checkpoint, open_checkpoint
from vllm_mtp.checkpoint.layer import StoredLayer, block_size, examine_layer
from vllm_mtp.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    find_mtp_layers,
    layer_name,
)
from vllm_mtp.checkpoint.precision import Storage
from vllm_mtp.checkpoint.safetensors_file import CheckpointError, TensorEntry
from vllm_mtp.checkpoint.write import (
    OutputTensor,
    atomic_folder,
    write_index,
    write_json,
    write_safetensors,
)

WEIGHTS_NAME = "nextn_layer_parameters.safetensors"
DTYPES = ("auto", "bfloat16")

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
FP8_STORAGES = (Storage.FP8_BLOCK, Storage.FP8)
FREE_SPACE_MARGIN = 64 * 2**20


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote, in plain values (``vllm-mtp export --json``)."""

    output_dir: str
    layer: int
    precision: str
    num_tensors: int
    nbytes: int
    copied_files: list[str]
    seconds: float


def export_nextn(
    input_dir: Path,
    output_dir: Path,
    dtype: str = "auto",
    layer: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Write a checkpoint's MTP layer as a NextN folder.

    Args:
        input_dir: a target's checkpoint, or a NextN folder to rewrite.
        output_dir: must not exist yet, or be empty.
        dtype: ``auto`` keeps every byte; ``bfloat16`` dequantises FP8 weights and
            rounds float32 and float16 ones.
        layer: index of the MTP layer, needed only where there are several.
        on_bytes: called with bytes written and bytes to write in all.

    Raises:
        CheckpointError: if the input is broken or has no complete MTP layer, or the
            output exists or does not fit on the disk. Nothing is left behind.
    """
    started = time.perf_counter()
    if dtype not in DTYPES:
        raise CheckpointError(f"--dtype {dtype} is unknown; use {' or '.join(DTYPES)}.")
    checkpoint = open_checkpoint(input_dir)
    stored = choose_layer(checkpoint, layer)
    stored.check_complete()
    block = block_size(checkpoint.quantization_config)
    tensors = plan_output(stored, dtype)
    total = sum(tensor.nbytes for tensor in tensors)
    with atomic_folder(output_dir) as folder:
        _check_free_space(folder, total)
        write_safetensors(folder / WEIGHTS_NAME, tensors, block, on_bytes)
        write_index(folder, tensors, WEIGHTS_NAME)
        plain = dtype != "auto" or set(stored.storages.values()) == {Storage.PLAIN}
        copied = _copy_other_files(checkpoint.path, folder, plain)
        config = build_config(checkpoint, stored, plain)
        write_json(folder / CONFIG_NAME, config)
    return ExportResult(
        output_dir=str(output_dir),
        layer=stored.index,
        precision=stored.precision if dtype == "auto" else dtype,
        num_tensors=len(tensors),
        nbytes=total,
        copied_files=copied,
        seconds=time.perf_counter() - started,
    )


def choose_layer(checkpoint: Checkpoint, index: int | None) -> StoredLayer:
    """Return the MTP layer to export, examined."""
    check_config_fields(checkpoint.path, checkpoint.config)
    layers = find_mtp_layers(checkpoint)
    names = ", ".join(map(str, layers))
    if not layers:
        raise CheckpointError(
            f"{checkpoint.path} stores no MTP layer: no model.layers.N with enorm, "
            "hnorm, eh_proj or shared_head, and none beyond num_hidden_layers="
            f"{checkpoint.config['num_hidden_layers']}. Take a checkpoint that ships "
            "one."
        )
    if index is None and len(layers) > 1:
        raise CheckpointError(
            f"{checkpoint.path} stores {len(layers)} MTP layers; choose one with "
            f"--layer: {names}."
        )
    chosen = min(layers) if index is None else index
    if chosen not in layers:
        raise CheckpointError(
            f"{checkpoint.path} has no MTP layer {chosen}; use --layer {names}."
        )
    block = block_size(checkpoint.quantization_config)
    return examine_layer(
        checkpoint.path, chosen, layers[chosen], checkpoint.config, block
    )


def plan_output(layer: StoredLayer, dtype: str) -> list[OutputTensor]:
    """Return the tensors to write, the widest dtype first so that all are aligned."""
    outputs: list[OutputTensor] = []
    scales: set[str] = set()
    if dtype == "bfloat16":
        scales = _check_dequantizable(layer)
    for name, entry in layer.tensors.items():
        if name in (EMBEDDING, HEAD) or name in scales:
            continue
        converted = dtype == "bfloat16" and _is_rounded(name, entry)
        scale = layer.tensors.get(_scale_name(layer, name)) if converted else None
        outputs.append(
            OutputTensor(layer_name(0, name), entry, to_bfloat16=converted, scale=scale)
        )
    outputs.sort(key=lambda out: (-out.dtype_bits, out.source.file, out.source.offset))
    return outputs


def _is_rounded(name: str, entry: TensorEntry) -> bool:
    return name.endswith(".weight") and entry.dtype in ("F8_E4M3", "F16", "F32")


def _scale_name(layer: StoredLayer, name: str) -> str:
    """Return the name of an FP8 weight's scale, or one that no tensor has."""
    module = name.rpartition(".")[0]
    last = {Storage.FP8_BLOCK: "weight_scale_inv", Storage.FP8: "weight_scale"}
    storage = layer.storages.get(module, Storage.PLAIN)
    return f"{module}.{last.get(storage, '')}"


def _check_dequantizable(layer: StoredLayer) -> set[str]:
    """Return the scales that dequantising uses up."""
    used: set[str] = set()
    for module, storage in layer.storages.items():
        if storage is Storage.PLAIN:
            continue
        if storage not in FP8_STORAGES:
            raise CheckpointError(
                f"--dtype bfloat16 turns FP8 weights into bfloat16, but {module} is "
                f"stored as {storage}. Export without --dtype."
            )
        used |= {_scale_name(layer, f"{module}.weight"), f"{module}.input_scale"}
    return used


def _check_free_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + FREE_SPACE_MARGIN:
        raise CheckpointError(
            f"the export takes {needed:,} bytes, but only {free:,} are free beside "
            f"{folder.parent}. Free some, or name another --output-dir."
        )


def _copy_other_files(source: Path, folder: Path, is_plain: bool) -> list[str]:
    """Copy tokenizer and other small files; return their names."""
    copied = []
    for path in sorted(source.iterdir()):
        name = path.name
        skipped = (
            name.startswith(".")
            or name == CONFIG_NAME
            or name.endswith(".index.json")
            or path.suffix in WEIGHT_SUFFIXES
            or (is_plain and is_quantization_file(name))
        )
        if not skipped and path.is_file():
            shutil.copyfile(path, folder / name)
            copied.append(name)
    return copied
