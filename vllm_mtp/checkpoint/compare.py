"""Whether a draft folder belongs to the target: config against config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_mtp.checkpoint.safetensors_file import CheckpointError

MODEL_TYPES = ("deepseek_v3", "deepseek_mtp")

IDENTITY_FIELDS = {
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "num_attention_heads": "attention shape",
    "q_lora_rank": "attention shape",
    "kv_lora_rank": "attention shape",
    "qk_nope_head_dim": "attention shape",
    "qk_rope_head_dim": "attention shape",
    "v_head_dim": "attention shape",
    "n_routed_experts": "experts",
    "n_shared_experts": "experts",
    "moe_intermediate_size": "experts",
    "num_experts_per_tok": "expert routing",
    "n_group": "expert routing",
    "topk_group": "expert routing",
    "topk_method": "expert routing",
    "scoring_func": "expert routing",
}
"""Fields that a draft folder of the same model has in common with the target."""

SHAPE_FIELDS = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""Fields without which the shapes of an MTP layer are unknown."""

ROPE_KEYS = ("rope_scaling", "rope_parameters")


def check_config_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` unless a ``config.json`` describes such a model."""
    if config.get("model_type") not in MODEL_TYPES:
        raise CheckpointError(
            f"the config of {folder} has model_type {config.get('model_type')!r}; "
            f"possible: {', '.join(MODEL_TYPES)} (DeepSeek-V3, R1 and V3.1). Name a "
            "checkpoint of such a model."
        )
    experts = config.get("n_routed_experts")
    width = "intermediate_size" if experts is None else "moe_intermediate_size"
    absent = [
        name for name in (*SHAPE_FIELDS, width) if not isinstance(config.get(name), int)
    ]
    if absent:
        raise CheckpointError(
            f"the config of {folder} does not give {', '.join(absent)} as whole "
            "numbers. Take the config.json that belongs to the weights."
        )


def check_same_model(
    folder: Path, draft: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    """Raise ``CheckpointError`` with both values where two configs disagree.

    A field that one of the two does not have is not compared: the draft layer is built
    from the target's config, and its tensors' shapes are checked against that.
    """
    model_type = draft.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"the draft folder {folder} has model_type {model_type!r}; possible: "
            f"{', '.join(MODEL_TYPES)}. Name a NextN folder of the target's own model, "
            "see vllm-mtp export."
        )
    differences = [
        f"{what}: {name} is {draft[name]} there and {target[name]} in the target"
        for name, what in IDENTITY_FIELDS.items()
        if name in draft and name in target and draft[name] != target[name]
    ]
    if differences:
        raise CheckpointError(
            f"the draft folder {folder} belongs to another model than the target: "
            f"{'; '.join(differences)}. Name a NextN folder of the target's own model, "
            "see vllm-mtp export."
        )


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a config's rotary table covers; None if unsaid.

    Source: vLLM 0.32, layers/rotary_embedding: yarn sizes its table by the original
    length times the factor, the others by ``max_position_embeddings``.
    """
    declared = config.get("max_position_embeddings")
    limits = [declared] if isinstance(declared, int) else []
    for key in ROPE_KEYS:
        rope = config.get(key)
        if not isinstance(rope, Mapping):
            continue
        original = rope.get("original_max_position_embeddings")
        factor = rope.get("factor")
        if isinstance(original, (int, float)) and isinstance(factor, (int, float)):
            limits.append(int(original * factor))
    return min(limits, default=None)


def check_positions(
    folder: Path, draft: Mapping[str, Any], max_model_len: int | None
) -> None:
    """Raise ``CheckpointError`` if requests could outgrow the draft's positions."""
    limit = max_positions(draft)
    if limit is None or max_model_len is None or max_model_len <= limit:
        return
    raise CheckpointError(
        f"the draft folder {folder} covers {limit} positions "
        f"(max_position_embeddings and rope_scaling of its config.json), but the "
        f"target serves max_model_len={max_model_len}. Set --max-model-len to at most "
        f"{limit}, or correct the folder's config if it was written for the target's "
        "context."
    )
