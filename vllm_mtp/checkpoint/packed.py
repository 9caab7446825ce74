"""Holds 4-bit tensors against the shapes that the quantisation config promises.

vLLM's loaders cut a packed tensor that is too large to what they need, so a wrong
layout or group size would load without a word and draft nonsense.
"""

from collections.abc import Mapping
from typing import Any

from vllm_mtp.checkpoint.layer import StoredLayer
from vllm_mtp.checkpoint.layout import layer_name
from vllm_mtp.checkpoint.precision import Storage, describe_shape_fault

WORD_BITS = 32

READERS = {
    Storage.AWQ_GPTQ: ("awq", "gptq"),
    Storage.PACKED: ("compressed-tensors",),
}
"""Forms of storage with packed words -> the ``quant_method``s that read them."""

OTHER_METHODS = ("fp8",)
"""Further methods of DeepSeek checkpoints, which read none of these."""

Shape = tuple[int, ...]


def find_packed_faults(
    layer: StoredLayer, quantization_config: Mapping[str, Any]
) -> list[str]:
    """Return what the config cannot read of a layer's packed modules.

    Methods that are not known here, and modules whose bits or groups the config sets
    by rules, are left to vLLM.

    Args:
        layer: complete, see ``StoredLayer.check_complete``.
        quantization_config: of the folder that the layer is stored in.
    """
    method = str(quantization_config.get("quant_method", ""))
    scheme = _uniform_scheme(quantization_config)
    faults = []
    for module, storage in layer.storages.items():
        readers = READERS.get(storage)
        if readers is None:
            continue
        if method not in readers:
            if any(method in known for known in (*READERS.values(), OTHER_METHODS)):
                name = layer_name(layer.index, module)
                faults.append(
                    f"{name} is stored as {storage}, which quant_method {method!r} "
                    f"of the config does not read (but {' or '.join(readers)} does)"
                )
            continue
        if scheme is None:
            continue
        # A decoder layer's linear modules are `[out, in]`, see layout.py.
        rows, columns = layer.required[f"{module}.weight"].shape
        for last, shape in _shapes(method, rows, columns, *scheme).items():
            entry = layer.tensors.get(f"{module}.{last}")
            if entry is not None and entry.shape != shape:
                name = layer_name(layer.index, f"{module}.{last}")
                faults.append(
                    f"{describe_shape_fault(name, entry.shape, shape)} for "
                    f"quant_method {method!r}, {scheme[0]} bits and group_size "
                    f"{scheme[1]}"
                )
    return faults


def _uniform_scheme(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return bits and group size (-1: whole rows) if they are the same everywhere."""
    rules = config.get("dynamic") or {}
    if not all(str(rule).startswith("-:") for rule in rules):
        return None
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    if config.get("quant_method") == "compressed-tensors":
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            return None
        [only] = groups.values()
        weights = only.get("weights") if isinstance(only, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type") != "int":
            return None
        bits = weights.get("num_bits")
        group = weights.get("group_size")
        if group is None and weights.get("strategy") == "channel":
            group = -1
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    return (bits, group) if bits > 0 and (group > 0 or group == -1) else None


def _shapes(
    method: str, rows: int, columns: int, bits: int, group: int
) -> dict[str, Shape]:
    """Return the shapes of a module's tensors by the last part of their names.

    Source: vLLM 0.32, create_weights of AutoAWQMarlinLinearMethod,
    AutoGPTQLinearMethod and CompressedTensorsWNA16.
    """

    def words(count: int) -> int:
        return -(-count * bits // WORD_BITS)

    groups = 1 if group == -1 else columns // group
    if method == "compressed-tensors":
        return {
            "weight_packed": (rows, words(columns)),
            "weight_scale": (rows, groups),
            "weight_zero_point": (words(rows), groups),
        }
    packed = {"awq": (columns, words(rows)), "gptq": (words(columns), rows)}[method]
    return {
        "qweight": packed,
        "scales": (groups, rows),
        "qzeros": (groups, words(rows)),
    }
