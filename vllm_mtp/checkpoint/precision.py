"""Tells from a module's tensors on disk how its weight is stored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_mtp.checkpoint.layout import TensorSpec
from vllm_mtp.checkpoint.safetensors_file import TensorEntry

FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
FP8_DTYPES = ("F8_E4M3",)
DEFAULT_BLOCK = (128, 128)


class Storage(StrEnum):
    """How a linear module's weight is stored."""

    PLAIN = "plain"
    """bfloat16, float16 or float32."""

    FP8_BLOCK = "fp8-block"
    """float8_e4m3 with a ``weight_scale_inv`` for each block, as DeepSeek ships."""

    FP8 = "fp8"
    """float8_e4m3 with a ``weight_scale`` for the tensor or each row."""

    INT8 = "int8"
    AWQ_GPTQ = "awq/gptq"
    PACKED = "compressed-tensors"
    NVFP4 = "nvfp4"


COMPANIONS = {
    Storage.PLAIN: ("weight",),
    Storage.FP8_BLOCK: ("weight", "weight_scale_inv"),
    Storage.FP8: ("weight", "weight_scale"),
    Storage.INT8: ("weight", "weight_scale"),
    Storage.AWQ_GPTQ: ("qweight", "qzeros", "scales"),
    Storage.PACKED: ("weight_packed", "weight_scale"),
    Storage.NVFP4: ("weight", "weight_scale", "weight_scale_2"),
}
"""Last parts of the names that each form of storage needs."""

OPTIONAL_COMPANIONS = (
    "g_idx",
    "input_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "input_global_scale",
    "bias",
)

ALL_COMPANIONS = sorted({*sum(COMPANIONS.values(), ()), *OPTIONAL_COMPANIONS})


@dataclass(frozen=True)
class StoredModule:
    """One linear module as it was found."""

    storage: Storage | None
    """None if too little of it is there to tell."""

    missing: tuple[str, ...]
    """Relative names of tensors that its form of storage needs."""

    faults: tuple[str, ...]
    """What does not fit, with the value found and the value needed."""

    names: tuple[str, ...]
    """Relative names of all its tensors."""


def examine_module(
    spec: TensorSpec,
    tensors: Mapping[str, TensorEntry],
    block: tuple[int, int] = DEFAULT_BLOCK,
) -> StoredModule:
    """Return how the module of ``spec`` is stored among a layer's ``tensors``."""
    parts = {
        last: tensors[f"{spec.module}.{last}"]
        for last in ALL_COMPANIONS
        if f"{spec.module}.{last}" in tensors
    }
    names = tuple(sorted(f"{spec.module}.{last}" for last in parts))
    storage = _guess_storage(parts)
    if storage is None:
        weight = parts.get("weight")
        if weight is None:
            return StoredModule(None, (spec.name,), (), names)
        fault = f"{spec.name} is stored as {weight.dtype}, which is not known here"
        return StoredModule(None, (), (fault,), names)
    missing = tuple(
        f"{spec.module}.{last}" for last in COMPANIONS[storage] if last not in parts
    )
    faults = tuple(_find_faults(spec, storage, parts, block))
    return StoredModule(storage, missing, faults, names)


def _guess_storage(parts: Mapping[str, TensorEntry]) -> Storage | None:
    """Return the form of storage that the tensors at hand belong to."""
    if "weight_packed" in parts:
        return Storage.PACKED
    if "qweight" in parts:
        return Storage.AWQ_GPTQ
    if "weight" not in parts:
        return None
    dtype = parts["weight"].dtype
    if dtype in FP8_DTYPES:
        return Storage.FP8 if "weight_scale" in parts else Storage.FP8_BLOCK
    if dtype in FLOAT_DTYPES:
        return Storage.PLAIN
    return {"I8": Storage.INT8, "U8": Storage.NVFP4}.get(dtype)


def _find_faults(
    spec: TensorSpec,
    storage: Storage,
    parts: Mapping[str, TensorEntry],
    block: tuple[int, int],
) -> list[str]:
    """Compare shapes where the form of storage keeps the weight's own shape."""
    unpacked = (Storage.PLAIN, Storage.FP8_BLOCK, Storage.FP8, Storage.INT8)
    if storage not in unpacked:
        return []
    found = parts["weight"].shape
    if found != spec.shape:
        return [describe_shape_fault(spec.name, found, spec.shape)]
    if storage is not Storage.FP8_BLOCK or "weight_scale_inv" not in parts:
        return []
    rows, columns = spec.shape
    needed = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    scale = parts["weight_scale_inv"].shape
    if scale == needed:
        return []
    name = f"{spec.module}.weight_scale_inv"
    blocks = f"blocks of {block[0]}x{block[1]}"
    return [f"{describe_shape_fault(name, scale, needed)} ({blocks})"]


def describe_shape_fault(
    name: str, found: tuple[int, ...], needed: tuple[int, ...]
) -> str:
    """Return both shapes in words."""
    return f"{name} is {list(found)} and should be {list(needed)}"


def describe_storage(
    storages: Mapping[str, Storage], tensors: Mapping[str, TensorEntry]
) -> str:
    """Return a layer's precision in a few words, for logs and reports."""
    kinds: dict[str, int] = {}
    for module, storage in storages.items():
        name = str(storage)
        if storage is Storage.PLAIN:
            name = FLOAT_DTYPES[tensors[f"{module}.weight"].dtype]
        kinds[name] = kinds.get(name, 0) + 1
    if len(kinds) == 1:
        return next(iter(kinds))
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return "mixed: " + ", ".join(f"{name} ({count})" for name, count in ordered)
