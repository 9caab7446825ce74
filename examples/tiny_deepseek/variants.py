"""Writes variants of the model folder for tests.

    python variants.py m0 /tmp/m0

`m0` drafts at random (acceptance near 0), `m1` nearly always agrees with its main
model, `no_mtp` lacks MTP tensors, `nextn_count` announces another number of MTP layers.
Nothing is trained here and nothing depends on the time, the machine or a global seed.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MODEL = Path(__file__).parent / "model"
Part = Literal["all", "experts", "eh_proj"]
Tensors = dict[str, Tensor]
Config = dict[str, Any]


def write_variant(
    target: Path,
    source: Path,
    edit: Callable[[Tensors, Config], Tensors],
) -> Path:
    """Copies a model folder with edited tensors and config, and returns the copy.

    Args:
        target: Folder to write; it is made if missing.
        source: Folder to copy.
        edit: Gets the tensors and the config, which it may change in place, and
            returns the tensors to write.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, target / name)
    config = json.loads((source / "config.json").read_text())
    tensors = edit(load_file(source / "model.safetensors"), config)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def get_mtp_prefix(config: Config) -> str:
    """Returns the prefix of the MTP layer's tensors."""
    return f"model.layers.{config['num_hidden_layers']}."


def is_shared(name: str) -> bool:
    """Whether an MTP tensor is a copy of the main model's embedding or head."""
    return "embed_tokens" in name or "shared_head.head" in name


def write_m0(target: Path, source: Path = MODEL) -> Path:
    """Writes the model with random MTP weights: next to nothing is accepted.

    The main model, its embedding and its head stay as they are, so the output does too.
    """

    def edit(tensors: Tensors, config: Config) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        for name in sorted(tensors):
            if not name.startswith(get_mtp_prefix(config)) or is_shared(name):
                continue
            weight = tensors[name]
            if weight.ndim == 2:
                noise = torch.randn(weight.shape, generator=generator)
                noise = noise * weight.shape[-1] ** -0.5
                tensors[name] = noise.to(weight.dtype)
        return tensors

    return write_variant(target, source, edit)


def write_m1(target: Path, source: Path = MODEL) -> Path:
    """Writes a model whose MTP layer computes what the main model computes.

    No transformer block adds anything to the residual stream (`o_proj` and `down_proj`
    are next to zero), so the main model's next token depends on the current token only.
    The MTP layer passes its token's embedding through `eh_proj`, drops the hidden
    state, and ends in the same head. `enorm` rescales what `shared_head.norm` rescales
    again, so both see the same direction; the embeddings are made large for the epsilon
    in the norms not to matter. A shift in the head keeps the greedy chain from
    settling: token t is followed by t + 1 within the vocabulary, then by the first
    ordinary token.
    """

    def edit(tensors: Tensors, config: Config) -> Tensors:
        vocab_size, hidden_size = config["vocab_size"], config["hidden_size"]
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(vocab_size, hidden_size, generator=generator)
        embeddings = rows / rows.norm(dim=-1, keepdim=True) * hidden_size**0.5
        successors = torch.arange(1, vocab_size + 1)
        first_ordinary = max(config["bos_token_id"], config["eos_token_id"]) + 1
        successors[-1] = first_ordinary
        head = torch.zeros_like(embeddings)
        head[successors] = embeddings / hidden_size**0.5 * 2.0
        mtp_prefix = get_mtp_prefix(config)
        for name, weight in tensors.items():
            if "embed_tokens" in name:
                new = embeddings
            elif name == "lm_head.weight" or "shared_head.head" in name:
                new = head
            elif "o_proj" in name or "down_proj" in name:
                # Lost in the residual stream's rounding. All zeros are refused as a
                # layer that was never filled in.
                new = torch.full(weight.shape, 1e-20)
            elif name.endswith("eh_proj.weight"):
                new = torch.eye(hidden_size, 2 * hidden_size)
            elif name in (
                "model.norm.weight",
                f"{mtp_prefix}enorm.weight",
                f"{mtp_prefix}shared_head.norm.weight",
            ):
                new = torch.ones(weight.shape)
            else:
                continue
            tensors[name] = new.to(weight.dtype).clone()
        return tensors

    return write_variant(target, source, edit)


def write_no_mtp(target: Path, part: Part = "all", source: Path = MODEL) -> Path:
    """Writes the model without some MTP tensors, while the config announces them.

    Args:
        target: Folder to write.
        part: What is left out: everything, the routed experts, or `eh_proj`.
        source: Folder to copy.
    """
    marks = {"all": "", "experts": ".mlp.experts.", "eh_proj": "eh_proj"}

    def edit(tensors: Tensors, config: Config) -> Tensors:
        prefix = get_mtp_prefix(config)
        return {
            name: weight
            for name, weight in tensors.items()
            if not (name.startswith(prefix) and marks[part] in name)
        }

    return write_variant(target, source, edit)


def write_nextn_count(target: Path, count: int | None, source: Path = MODEL) -> Path:
    """Writes the model with another `num_nextn_predict_layers`; None removes it."""

    def edit(tensors: Tensors, config: Config) -> Tensors:
        config.pop("num_nextn_predict_layers")
        if count is not None:
            config["num_nextn_predict_layers"] = count
        return tensors

    return write_variant(target, source, edit)


def main() -> None:
    """Writes one variant with its default arguments."""
    writers: dict[str, Callable[[Path], Path]] = {
        "m0": write_m0,
        "m1": write_m1,
        "no_mtp": write_no_mtp,
        "nextn_2": lambda target: write_nextn_count(target, 2),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variant", choices=sorted(writers))
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    print(writers[args.variant](args.target))


if __name__ == "__main__":
    main()
