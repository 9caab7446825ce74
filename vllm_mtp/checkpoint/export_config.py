"""The ``config.json`` of a NextN folder, made from its source's."""

import re
from collections.abc import Mapping
from typing import Any

from vllm_mtp.checkpoint.folder import Checkpoint
from vllm_mtp.checkpoint.layer import StoredLayer
from vllm_mtp.checkpoint.layout import NEXTN_ARCHITECTURE, layer_name
from vllm_mtp.checkpoint.precision import Storage

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
QUANTIZATION_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
)

LAYER_NUMBER = re.compile(r"(?<![a-z_])layers(\\?\.)(\d+)(?!\d)")


def is_quantization_file(name: str) -> bool:
    """Whether a file declares a quantisation outside of ``config.json``."""
    return name in QUANTIZATION_FILES


def build_config(
    checkpoint: Checkpoint, layer: StoredLayer, is_plain: bool
) -> dict[str, Any]:
    """Return the config of a NextN folder that holds ``layer`` at index 0.

    Args:
        checkpoint: the source.
        layer: the layer that was written.
        is_plain: whether all its weights were written unquantised; the config then
            declares no quantisation, whatever the source's says.
    """
    config = dict(checkpoint.config)
    config["architectures"] = [NEXTN_ARCHITECTURE]
    config["num_hidden_layers"] = 1
    config["num_nextn_predict_layers"] = 1
    for key in QUANTIZATION_KEYS:
        if key not in config:
            continue
        if is_plain:
            del config[key]
        else:
            config[key] = _follow_layer(config[key], layer)
    return config


def _follow_layer(quantization: Any, layer: StoredLayer) -> Any:
    """Return a quantisation config whose ignore lists speak of layer 0."""
    if not isinstance(quantization, Mapping):
        return quantization
    result = dict(quantization)
    for key in IGNORE_KEYS:
        if isinstance(result.get(key), list):
            result[key] = _rename_ignored(result[key], layer.index)
    plain = [
        layer_name(0, module)
        for module, storage in layer.storages.items()
        if storage is Storage.PLAIN and module != "eh_proj"
    ]
    if plain and result.get("quant_method") == "fp8":
        key = "modules_to_not_convert"
        result[key] = sorted({*(result.get(key) or []), *plain})
    return result


def _rename_ignored(names: list[Any], index: int) -> list[Any]:
    """Rename this layer's entries to layer 0 and drop those of other layers."""
    renamed = []
    for name in names:
        match = LAYER_NUMBER.search(name) if isinstance(name, str) else None
        if match is None:
            renamed.append(name)
        elif int(match[2]) == index:
            renamed.append(LAYER_NUMBER.sub(r"layers\g<1>0", name))
    return renamed
