"""Reads and writes the model as a DeepSeek-V3 checkpoint folder."""

import json
from pathlib import Path

import torch
from config import ModelConfig
from model import TinyDeepseek
from safetensors.torch import load_file, save_file
from torch import Tensor

# Here -> in the checkpoint, inside one decoder layer.
RENAMED = {
    "mlp.bias": "mlp.gate.e_score_correction_bias",
    "shared_head_norm.weight": "shared_head.norm.weight",
}
SHARED_WITH_MTP = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "shared_head.head.weight",
}


def build_checkpoint(model: TinyDeepseek) -> dict[str, Tensor]:
    """Returns the tensors under their DeepSeek-V3 names, bfloat16.

    The router's selection bias stays float32, as in DeepSeek's own checkpoints. The
    MTP layer carries copies of the embedding and the head, as theirs does.
    """
    mtp_prefix = f"layers.{model.config.num_hidden_layers}"
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        name = name.replace("mtp", mtp_prefix, 1) if name.startswith("mtp.") else name
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        name = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("mlp.gate_up"):
            prefix = name.removesuffix("gate_up")
            for expert, (gate, up) in enumerate(value.unbind(0)):
                tensors[f"{prefix}experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}experts.{expert}.up_proj.weight"] = up
        elif name.endswith("mlp.down"):
            prefix = name.removesuffix("down")
            for expert, down in enumerate(value.unbind(1)):
                tensors[f"{prefix}experts.{expert}.down_proj.weight"] = down
        else:
            tensors[name] = value
    for source, copy in SHARED_WITH_MTP.items():
        tensors[f"model.{mtp_prefix}.{copy}"] = tensors[source]
    return {
        name: value.detach()
        .cpu()
        .to(torch.float32 if name.endswith("_bias") else torch.bfloat16)
        .clone()
        .contiguous()
        for name, value in tensors.items()
    }


def save_model(model: TinyDeepseek, folder: Path) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_hf()
    save_file(
        build_checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"}
    )
    write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", generation)


def load_model(folder: Path) -> TinyDeepseek:
    """Returns the model of a folder that `save_model` wrote, in float32."""
    config = ModelConfig.from_hf(folder / "config.json")
    model = TinyDeepseek(config)
    load_weights(model, load_file(folder / "model.safetensors"))
    return model.eval()


def load_weights(model: TinyDeepseek, tensors: dict[str, Tensor]) -> None:
    """Copies checkpoint tensors into a model; the inverse of `build_checkpoint`."""
    config = model.config
    mtp_prefix = f"model.layers.{config.num_hidden_layers}"
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        source = name if name.startswith("lm_head") else f"model.{name}"
        source = source.replace("model.mtp", mtp_prefix)
        for ours, theirs in RENAMED.items():
            source = source.replace(ours, theirs)
        experts = [
            source.rsplit(".", 1)[0] + f".experts.{index}."
            for index in range(config.n_routed_experts)
        ]
        if name.endswith("mlp.gate_up"):
            pairs = [
                [tensors[f"{key}{part}_proj.weight"] for part in ("gate", "up")]
                for key in experts
            ]
            state[name] = torch.stack([torch.stack(pair) for pair in pairs])
        elif name.endswith("mlp.down"):
            downs = [tensors[f"{key}down_proj.weight"] for key in experts]
            state[name] = torch.stack(downs, dim=1)
        else:
            state[name] = tensors[source]
    model.load_state_dict(state)


def write_json(path: Path, value: object) -> None:
    """Writes JSON with an indent of two and a last newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
