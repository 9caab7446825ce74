"""Refusals that need no weights: parallelism, model, draft checkpoint."""

from typing import Any

from vllm_mtp.checkpoint.validate import validate_draft_checkpoint
from vllm_mtp.config import SettingsError

TARGET_MODEL_TYPES = ("deepseek_v3",)
"""Config ``model_type`` of the targets served."""


def check_parallel(parallel_config: Any) -> None:
    """Raise ``SettingsError`` for parallelism that trees cannot serve."""
    unsupported = {
        "pipeline_parallel_size": "pipeline parallelism: other stages would need the "
        "accepted path to move their KV",
        "data_parallel_size": "data parallelism: idle ranks would have to run the same "
        "draft levels, which is not proven yet; start one server per replica instead",
        "prefill_context_parallel_size": "prefill context parallelism",
        "decode_context_parallel_size": "decode context parallelism: a tree's rows "
        "would lie on several ranks",
    }
    for name, what in unsupported.items():
        value = getattr(parallel_config, name, 1)
        if value > 1:
            raise SettingsError(
                f"mtp_tree: {name}={value} is not supported ({what}). Set {name}=1, "
                "or use the method mtp."
            )
    for name in ("enable_dbo", "enable_batch_sharded_sampling"):
        if getattr(parallel_config, name, False):
            raise SettingsError(f"mtp_tree: {name} is not supported. Remove it.")


def check_features(engine_args: Any) -> None:
    """Raise ``SettingsError`` for engine features that trees cannot serve yet."""
    unsupported = {
        "kv_transfer_config": "KV connectors may save a row's KV before the accepted "
        "path is moved to its place",
        "kv_offloading_size": "KV offloading may save a row's KV before the accepted "
        "path is moved to its place",
        "watermark_config": "watermarking draws its own tokens",
        "return_sampling_mask": "sampling masks are made by the rejection sampler",
        "enable_trace_replay": "trace replay forces one token per step",
    }
    for name, reason in unsupported.items():
        if getattr(engine_args, name, None):
            raise SettingsError(
                f"mtp_tree: {name} is not supported ({reason}). Remove it, or use the "
                "method mtp."
            )


def check_model(
    model_config: Any, settings: dict[str, Any], load_format: str = "auto"
) -> None:
    """Raise ``SettingsError`` unless the target has an MTP layer that can draft."""
    hf_config = model_config.hf_config
    model_type = getattr(hf_config, "model_type", None)
    if model_type not in TARGET_MODEL_TYPES:
        raise SettingsError(
            f"mtp_tree: the target's model_type is {model_type!r}; supported: "
            f"{', '.join(TARGET_MODEL_TYPES)} (DeepSeek-V3, R1 and V3.1)."
        )
    # Says most, where the files are local; what follows holds for models of a hub.
    validate_draft_checkpoint(model_config, settings.get("model"), load_format)
    layers = getattr(hf_config, "num_nextn_predict_layers", None)
    if settings.get("model") is None and not layers:
        raise SettingsError(
            f"mtp_tree: the target has no MTP layer (num_nextn_predict_layers is "
            f"{layers}), so there is nothing to draft with. Use a checkpoint that "
            'ships one, or name a NextN folder with "model" in --speculative-config.'
        )
    if settings.get("model") is None and layers is not None and layers > 1:
        raise SettingsError(
            f"mtp_tree: num_nextn_predict_layers={layers}; exactly one MTP layer is "
            "supported, used again at each depth. Write one of them with vllm-mtp "
            'export and name that folder with "model" in --speculative-config.'
        )
