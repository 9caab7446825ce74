"""Start-up checks of the checkpoint: headers and configs, before any weight is loaded.

Whatever is wrong is raised as ``SettingsError`` in the front-end process, so that a
server refuses within a second instead of after loading the target.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_mtp.checkpoint.compare import (
    IDENTITY_FIELDS,
    check_positions,
    check_same_model,
)
from vllm_mtp.checkpoint.folder import (
    Checkpoint,
    has_weights,
    open_checkpoint,
    read_config,
)
from vllm_mtp.checkpoint.layer import StoredLayer, block_size, examine_layer
from vllm_mtp.checkpoint.layout import find_mtp_layers
from vllm_mtp.checkpoint.plan import LoadPlan, plan_load
from vllm_mtp.checkpoint.safetensors_file import CheckpointError
from vllm_mtp.config import SettingsError

logger = logging.getLogger("vllm." + __name__)

COUNT = "num_nextn_predict_layers"

CONFIG_FIELDS = (
    *IDENTITY_FIELDS,
    "num_hidden_layers",
    "intermediate_size",
    "tie_word_embeddings",
)
"""Fields of a target's config that the checks read."""

CHECKED_LOAD_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
)
"""vLLM's load formats that read the folder's safetensors files."""


def validate_draft_checkpoint(
    model_config: Any, draft: str | None, load_format: str = "auto"
) -> LoadPlan | None:
    """Check what ``mtp_tree`` would load, as far as local folders tell.

    Args:
        model_config: the target's ``vllm.config.ModelConfig``.
        draft: ``"model"`` of the speculative config; None for the MTP layer inside
            the target's checkpoint.
        load_format: vLLM's; formats that do not read safetensors are not checked.

    Returns:
        How the layer will be loaded, or None where nothing could be checked: a model
        of a hub that is not on disk yet, or random weights.

    Raises:
        SettingsError: if the layer is missing, incomplete, of another model, or its
            files are broken.
    """
    folder = Path(draft or model_config.model)
    unread = load_format not in CHECKED_LOAD_FORMATS or not folder.is_dir()
    # A target without any weights is a config for random ones, or vLLM's to refuse.
    if unread or (draft is None and not has_weights(folder)):
        logger.debug(
            "mtp_tree: %s is not checked before loading (load format %s)",
            folder,
            load_format,
        )
        return None
    target = config_fields(model_config.hf_config)
    try:
        checkpoint = open_checkpoint(folder)
        if draft is None:
            count = declared_count(model_config)
            return check_embedded_layer(checkpoint, target, count)
        return check_draft_folder(checkpoint, target, model_config.max_model_len)
    except CheckpointError as error:
        raise SettingsError(f"mtp_tree: {error}") from error


def config_fields(hf_config: Any) -> dict[str, Any]:
    """Return what the checks need of a transformers config, overrides included."""
    missing = object()
    values = {name: getattr(hf_config, name, missing) for name in CONFIG_FIELDS}
    return {name: value for name, value in values.items() if value is not missing}


def declared_count(model_config: Any, folder: Path | None = None) -> Any:
    """Return how many MTP layers the target declares; None if it does not say.

    ``folder`` is where its files are, if it was named by a hub's id.

    Transformers fills in 1 where ``config.json`` says nothing, so the file is read,
    and ``--hf-overrides`` after it.
    """
    overrides = getattr(model_config, "hf_overrides", None)
    if isinstance(overrides, Mapping) and COUNT in overrides:
        return overrides[COUNT]
    return read_config(folder or Path(model_config.model)).get(COUNT)


def check_embedded_layer(
    checkpoint: Checkpoint, target: Mapping[str, Any], count: Any
) -> LoadPlan:
    """Check the MTP layer inside a target's checkpoint; return how it is loaded.

    Args:
        checkpoint: the target's.
        target: fields of its config, see ``config_fields``.
        count: how many MTP layers it declares.

    Raises:
        CheckpointError: see ``validate_draft_checkpoint``.
    """
    first = target["num_hidden_layers"]
    layers = find_mtp_layers(checkpoint, first)
    _check_count(checkpoint.path, count, list(layers), first)
    tensors = layers.get(first, {})
    return _plan_layer(checkpoint, first, tensors, target, is_separate=False)


def check_draft_folder(
    checkpoint: Checkpoint, target: Mapping[str, Any], max_model_len: int | None = None
) -> LoadPlan:
    """Check the one MTP layer of a draft folder; return how it is loaded.

    The folder may be a NextN folder, with the layer at index 0 or at its old index, or
    a whole checkpoint of the same model, of which only the MTP layer is used.

    Raises:
        CheckpointError: see ``validate_draft_checkpoint``.
    """
    folder, config = checkpoint.path, checkpoint.config
    check_same_model(folder, config, target)
    check_positions(folder, config, max_model_len)
    layers = find_mtp_layers(checkpoint)
    first = min(layers, default=0)
    _check_count(folder, config.get(COUNT), list(layers), first)
    return _plan_layer(
        checkpoint, first, layers.get(first, {}), target, is_separate=True
    )


def _check_count(folder: Path, count: Any, stored: list[int], first: int) -> None:
    """Refuse a declared number of MTP layers that the tensors do not bear out."""
    held = (
        f"it stores {len(stored)} (model.layers.{', '.join(map(str, stored))})"
        if stored
        else "it stores none"
    )
    if not count:
        said = "says 0" if count == 0 else "does not say"
        way_out = (
            f"Set it to {len(stored)} in config.json, or with --hf-overrides '{{\""
            f"{COUNT}\": {len(stored)}}}' if it is the target"
            if stored
            else "Take a checkpoint that ships an MTP layer, or name a NextN folder "
            'with "model" in --speculative-config'
        )
        raise CheckpointError(
            f"the config of {folder} {said} how many MTP layers there are "
            f"({COUNT}), and {held}, so there is nothing to draft with. {way_out}."
        )
    if not isinstance(count, int) or count < 0:
        raise CheckpointError(
            f"the config of {folder} gives {COUNT}={count!r}; a whole number is needed."
        )
    if stored and count != len(stored):
        raise CheckpointError(
            f"the config of {folder} announces {COUNT}={count} MTP layers, but {held}. "
            "Correct the config, or take a checkpoint in which the two agree."
        )
    if count > 1:
        raise CheckpointError(
            f"{folder} has {count} MTP layers; mtp_tree drafts with exactly one, used "
            "again at each depth. Write one of them as a NextN folder (vllm-mtp export "
            f'--layer {first}) and name that with "model" in --speculative-config.'
        )


def _plan_layer(
    checkpoint: Checkpoint,
    index: int,
    tensors: Mapping[str, Any],
    target: Mapping[str, Any],
    is_separate: bool,
) -> LoadPlan:
    quantization = checkpoint.quantization_config
    layer: StoredLayer = examine_layer(
        checkpoint.path, index, tensors, target, block_size(quantization)
    )
    layer.check_complete()
    return plan_load(layer, quantization, is_separate)
