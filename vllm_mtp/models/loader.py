"""Loads the draft model in a worker: plan from headers, build, load, share, check."""

import logging
from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

from vllm_mtp import compat
from vllm_mtp.checkpoint.folder import open_checkpoint
from vllm_mtp.checkpoint.plan import LoadPlan
from vllm_mtp.checkpoint.safetensors_file import CheckpointError
from vllm_mtp.checkpoint.sharing import find_own_copies
from vllm_mtp.checkpoint.validate import (
    CHECKED_LOAD_FORMATS,
    check_draft_folder,
    check_embedded_layer,
    config_fields,
    declared_count,
)
from vllm_mtp.config import SettingsError
from vllm_mtp.models.draft_model import MTPDraftModel, SharedLater, current_plan

logger = logging.getLogger("vllm." + __name__)

ARCHITECTURE = "MTPTreeDraftModel"
"""Our name in vLLM's model registry."""


def load_mtp_layer(target_model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
    """Load the MTP layer that a target drafts with; takes ``load_eagle_model``'s place.

    Args:
        target_model: loaded already; its embedding and head are shared.
        vllm_config: the engine's; ``speculative_config.model`` says where the layer is.

    Raises:
        SettingsError: if the layer is incomplete, of another model, or cannot be read
            in the precision in which it is stored.
    """
    plan = make_plan(vllm_config)
    if plan is not None:
        logger.info("mtp_tree: drafting with %s", plan.describe())
    token = current_plan.set(plan)
    try:
        model: nn.Module = compat.load_draft_model(
            target_model, vllm_config, ARCHITECTURE, MTPDraftModel
        )
    finally:
        current_plan.reset(token)
    _check_shared(model)
    _check_rotary_table(model, vllm_config.model_config.max_model_len)
    return model


def make_plan(vllm_config: VllmConfig) -> LoadPlan | None:
    """Return how the layer is loaded, from headers; None for weights without files."""
    load_config = vllm_config.load_config
    if load_config.load_format not in CHECKED_LOAD_FORMATS:
        return None
    target_config = vllm_config.model_config
    draft_config = vllm_config.speculative_config.draft_model_config
    target_folder = _find_folder(target_config, load_config)
    is_separate = draft_config.model != target_config.model
    folder = _find_folder(draft_config, load_config) if is_separate else target_folder
    if folder is None:
        logger.debug("mtp_tree: no local files of %s to read", draft_config.model)
        return None
    fields = config_fields(target_config.hf_config)
    try:
        checkpoint = open_checkpoint(folder)
        if not is_separate:
            count = declared_count(target_config, folder)
            return check_embedded_layer(checkpoint, fields, count)
        plan = check_draft_folder(checkpoint, fields, target_config.max_model_len)
        target = open_checkpoint(target_folder).tensors if target_folder else {}
        return plan.with_own(find_own_copies(plan.layer, target))
    except CheckpointError as error:
        raise SettingsError(f"mtp_tree: {error}") from error


def _find_folder(model_config: ModelConfig, load_config: Any) -> Path | None:
    """Return where a model's files are, fetched as vLLM does if they are not yet."""
    if getattr(model_config, "model_weights", None):
        # Weights are streamed from an object store; the folder holds only the config.
        return None
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    # vLLM takes the first pattern that a repository has, so one call for each.
    for pattern in ("config.json", "*.safetensors"):
        folder = download_weights_from_hf(
            model_config.model,
            load_config.download_dir,
            [pattern],
            model_config.revision,
            ignore_patterns=load_config.ignore_patterns,
        )
    return Path(folder)


def _check_shared(model: nn.Module) -> None:
    """Raise if the embedding or head was to be shared, but the target had none."""
    waiting = [
        name for name, part in model.named_modules() if isinstance(part, SharedLater)
    ]
    if waiting:
        raise SettingsError(
            "mtp_tree: the target has no embedding or head on this rank to share with "
            f"the draft ({', '.join(waiting)}). Set pipeline_parallel_size=1."
        )


def _check_rotary_table(model: nn.Module, max_model_len: int) -> None:
    """Raise if positions could run off the end of the draft's rotary table."""
    for name, part in model.named_modules():
        table = getattr(part, "cos_sin_cache", None)
        if table is not None and table.shape[0] < max_model_len:
            raise SettingsError(
                f"mtp_tree: the draft's rotary table ({name}) covers "
                f"{table.shape[0]} positions, but max_model_len is {max_model_len}. "
                f"Set --max-model-len to at most {table.shape[0]}."
            )
