"""Inflates the tiny DeepSeek-V3 to the step cost of the real one, with the same ids.

The default is one tensor-parallel rank of eight of DeepSeek-V3: all 61 layers and the
MTP layer. Two things differ: the vocabulary is whole, and weights are bfloat16 instead
of FP8, with experts half as wide, so that experts read the same bytes. The trained
layers compute what they computed, the others add exactly nothing:

- **Hidden size.** A value lives in several channels, each scaled by a power of two, so
  that the sum of squares grows as the width does: RMSNorm's statistics stay the same,
  and no product is rounded. Readers look at the first copy. The other channels are
  *dead*: layers write noise of 1e-12 into them, so that no weight is a plain zero.
- **Heads, ranks, experts.** More of them, whose weights write to dead channels only.
- **Softmax scale.** It follows the head dimension; YaRN's mscale takes that back.
- **Vocabulary.** One channel is a positive constant that the head's unused rows turn
  into logits of about minus a thousand.
- **Routing.** Trained layers pick the same two experts with the same weights, and six
  more at weight zero, by the hidden state (see ``route_like_tiny``).

Nothing but a configuration is written to disk: `benchmarks/serving/loader.py` makes the
weights inside vLLM.
"""

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny_deepseek" / "model"

NOISE = 0.02
"""Standard deviation of weights that no trained value depends on."""

DEAD = 2.0**-40
"""Scale of what is written into dead channels: far below a float32's last bit."""

CONSTANT = 2.0**-10
"""What every embedding holds in the constant channel."""

NEVER = 2.0**24
"""Minus the head's weight of the constant channel in unused rows."""


@dataclasses.dataclass(frozen=True)
class Inflation:
    """Shape of the inflated model; most fields carry their names in `config.json`."""

    num_hidden_layers: int = 61
    hidden_size: int = 7168
    vocab_size: int = 129_280
    first_k_dense_replace: int = 3
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    # Of DeepSeek-V3's 128 heads an eighth, of its widths of 18432 and 2048 a sixteenth:
    # an eighth in bytes of FP8.
    num_attention_heads: int = 16
    intermediate_size: int = 1152
    moe_intermediate_size: int = 128

    weight_sets: int = 4
    """Distinct sets of weights of the added layers, used in turn. A set is used again
    after so many bytes that no cache holds it, and memory stays free for KV."""

    skip_above: int = 1 << 30
    """Passes of more rows skip the added layers. Prompts are read faster that way;
    set it above the largest decoding batch. Needs a model that is not compiled."""


class Space:
    """Where the values of a trained vector lie in a wider one."""

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self.scales: list[float] = []
        rest = width / size
        for power in range(16, -13, -1):
            while 4.0**power <= rest and rest > 1e-7 * width / size:
                self.scales.append(2.0**power)
                rest -= 4.0**power
        self.live = size * len(self.scales)
        if self.live > width:
            raise ValueError(
                f"{size} values need {self.live} channels to keep their norm, but the "
                f"width is {width}. Use {size} times a power of 4, or much more."
            )

    def repeat(self, weight: Tensor) -> Tensor:
        """All scaled copies of the rows of `weight`, one block after the other."""
        return torch.cat([weight * scale for scale in self.scales])

    def fill_reader(self, out: Tensor, weight: Tensor) -> None:
        """Lets `out` [..., rows, width] read what `weight` [..., rows, size] reads."""
        out[..., : min(self.live + 1, self.width)] = 0
        out[..., : self.size] = weight / self.scales[0]

    def fill_writer(self, out: Tensor, weight: Tensor | None = None) -> None:
        """Lets `out` [..., width, columns] write `weight`, or dead channels only."""
        out.normal_(std=DEAD)
        out[..., : min(self.live + 1, self.width), :] = 0
        if weight is not None:
            out[: self.live, : weight.shape[1]] = self.repeat(weight)

    def fill_norm(self, out: Tensor, weight: Tensor | None) -> None:
        """Scales of an RMSNorm; every copy keeps its own."""
        out.fill_(1.0)
        if weight is not None:
            out[: self.live] = weight.repeat(len(self.scales))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the trained tensors of one layer are found."""

    tensors: dict[str, Tensor]
    index: int | None
    prefix: str
    like: Tensor

    def find(self, name: str) -> Tensor | None:
        """The tensor of this name inside the layer; None: the layer is an added one."""
        found = self.tensors.get(self.prefix + name)
        return found if found is None else found.to(self.like)


class Inflator:
    """Computes the parameters of vLLM's inflated model from the trained tensors."""

    def __init__(self, tiny: Path, shape: Inflation) -> None:
        self.shape = shape
        self.folder = tiny
        self.config: dict[str, Any] = json.loads((tiny / "config.json").read_text())
        self.hidden = Space(self.config["hidden_size"], shape.hidden_size)
        self.query = Space(self.config["q_lora_rank"], shape.q_lora_rank)
        if self.hidden.live >= shape.hidden_size:
            raise ValueError(
                f"hidden_size={shape.hidden_size} has no channel to spare."
            )
        self.constant = self.hidden.live
        dense, layers = (
            self.config[key] for key in ("first_k_dense_replace", "num_hidden_layers")
        )
        offset = shape.first_k_dense_replace - dense
        self.trained = {i if i < dense else i + offset: i for i in range(layers)}
        """Layer of the inflated model -> layer of the trained one."""
        if max(self.trained) >= shape.num_hidden_layers:
            raise ValueError(f"num_hidden_layers={shape.num_hidden_layers}: too few")
        self.trained[shape.num_hidden_layers] = layers

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The trained checkpoint."""
        return load_file(self.folder / "model.safetensors")

    @cached_property
    def means(self) -> dict[int, Tensor]:
        """Mean input of the routers, by trained layer; -1: of the added layers.

        Random routers that look away from it spread their rows evenly over experts.
        """
        sys.path.insert(0, str(TINY.parent))
        from checkpoint import load_model  # type: ignore[import-not-found]
        from model import attend_causally  # type: ignore[import-not-found]

        model = load_model(self.folder)
        entries = json.loads((TINY.parent / "prompts.json").read_text())
        found: dict[int, list[Tensor]] = {}

        def note(index: int, value: Tensor) -> None:
            found.setdefault(index, []).append(value.flatten(0, -2).mean(0))

        for index, layer in enumerate([*model.layers, model.mtp]):
            layer.mlp.register_forward_pre_hook(
                lambda _, inputs, index=index: note(index, inputs[0])
            )
        model.norm.register_forward_pre_hook(lambda _, inputs: note(-1, inputs[0]))
        with torch.inference_mode():
            for entry in entries[:24]:
                ids = torch.tensor([entry["token_ids"]])
                hidden = model(ids)
                model.draft(0, ids[:, 1:], hidden[:, :-1], attend_causally)
        return {index: torch.stack(rows).mean(0) for index, rows in found.items()}

    @property
    def hf_config(self) -> dict[str, Any]:
        """The inflated model's `config.json`."""
        names = self.config.keys() & {f.name for f in dataclasses.fields(Inflation)}
        config = {**self.config, **{n: getattr(self.shape, n) for n in names}}
        config["num_key_value_heads"] = self.shape.num_attention_heads
        # The softmax is scaled by head_dim**-0.5 * (0.1 * mscale * log(factor) + 1)**2.
        rope = config["qk_rope_head_dim"]
        ratio = (self.shape.qk_nope_head_dim + rope) / (
            self.config["qk_nope_head_dim"] + rope
        )
        scaling = dict(self.config["rope_scaling"])
        log = 0.1 * math.log(scaling["factor"])
        root = (log * scaling["mscale_all_dim"] + 1) * ratio**0.25
        scaling["mscale"] = scaling["mscale_all_dim"] = (root - 1) / log
        return {**config, "rope_scaling": scaling}

    def write(self, folder: Path) -> None:
        """Writes the inflated model's folder, with the trained one inside it."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.folder, folder / "tiny", dirs_exist_ok=True)
        for path in self.folder.glob("*.json"):
            shutil.copy(path, folder)
        files = {
            "config.json": self.hf_config,
            "inflation.json": dataclasses.asdict(self.shape),
        }
        for name, value in files.items():
            (folder / name).write_text(json.dumps(value, indent=2) + "\n")

    @classmethod
    def open(cls, folder: Path) -> "Inflator":
        """The inverse of `write`."""
        shape = json.loads((folder / "inflation.json").read_text())
        return cls(folder / "tiny", Inflation(**shape))

    @torch.no_grad()
    def fill(self, name: str, out: Tensor) -> None:
        """Sets one parameter of vLLM's model (`DeepseekV3`, or the MTP layer's).

        Args:
            name: vLLM's, with what it fuses: `fused_qkv_a_proj`, `gate_up_proj`, ...
            out: The parameter's values, on any device.
        """
        match = re.fullmatch(r"model\.layers\.(\d+)\.(?:mtp_block\.)?(.+)", name)
        part = match[2] if match else name
        index = self.trained.get(int(match[1])) if match else None
        prefix = f"model.layers.{index}." if match else ""
        is_added = match is not None and index is None
        source = Source({} if is_added else self.tensors, index, prefix, out)
        for pattern, method in self._methods.items():
            if re.search(pattern, part):
                method(self, out, part, source)
                return
        raise ValueError(f"unknown parameter {name}")

    def _fill_norm(self, out: Tensor, part: str, source: Source) -> None:
        if "kv_a_layernorm" in part:
            weight = source.find(part)
            out.fill_(1.0) if weight is None else out.copy_(weight)
            return
        space = self.query if "q_a_layernorm" in part else self.hidden
        space.fill_norm(out, source.find(part))

    def _fill_embedding(self, out: Tensor, part: str, source: Source) -> None:
        weight = self.tensors["model.embed_tokens.weight"].to(out)
        out.normal_(std=DEAD)
        # Words that never come have embeddings of those that do, so that passes over
        # random ones (which time step costs) are spread over the experts.
        for start in range(0, len(out), len(weight)):
            rows = out[start : start + len(weight), : self.hidden.live]
            rows.copy_(self.hidden.repeat(weight[: len(rows)].T).T)
        out[:, self.constant] = CONSTANT

    def _fill_head(self, out: Tensor, part: str, source: Source) -> None:
        weight = self.tensors["lm_head.weight"].to(out)
        out.normal_(std=NOISE)
        out[:, : self.hidden.live] = 0
        self.hidden.fill_reader(out[: len(weight)], weight)
        out[len(weight) :, self.constant] = -NEVER

    def _fill_eh(self, out: Tensor, part: str, source: Source) -> None:
        hidden, width = self.hidden, self.hidden.width
        hidden.fill_writer(out)
        rows = hidden.repeat(self.tensors[source.prefix + part].to(out))
        for half, values in enumerate(rows.split(hidden.size, dim=1)):
            hidden.fill_reader(out[: hidden.live, half * width :][:, :width], values)
        # At position 0 the embedding is masked, and its constant with it.
        out[self.constant, self.constant] = 2.0**-4
        out[self.constant, width + self.constant] = 1.0

    def _fill_qkv_a(self, out: Tensor, part: str, source: Source) -> None:
        out.normal_(std=NOISE)
        query, latent = out.split([self.query.width, len(out) - self.query.width])
        weight = source.find("self_attn.q_a_proj.weight")
        if weight is None:
            return
        self.hidden.fill_reader(query[: self.query.live], self.query.repeat(weight))
        query[self.query.live :] *= DEAD
        self.hidden.fill_reader(
            latent, source.find("self_attn.kv_a_proj_with_mqa.weight")
        )

    def _fill_q_b(self, out: Tensor, part: str, source: Source) -> None:
        out.normal_(std=NOISE)
        weight = source.find(part)
        if weight is None:
            return
        heads, nope = (
            self.config["num_attention_heads"],
            self.config["qk_nope_head_dim"],
        )
        trained = weight.view(heads, -1, self.query.size)
        wide = out.view(self.shape.num_attention_heads, -1, self.query.width)[:heads]
        # Padded dimensions of a query meet zeros in the key.
        self.query.fill_reader(wide[:, :nope], trained[:, :nope])
        wide = wide[:, self.shape.qk_nope_head_dim :]
        self.query.fill_reader(wide, trained[:, nope:])

    def _fill_kv_b(self, out: Tensor, part: str, source: Source) -> None:
        out.normal_(std=NOISE)
        weight = source.find(part)
        if weight is None:
            return
        heads, nope = (
            self.config["num_attention_heads"],
            self.config["qk_nope_head_dim"],
        )
        trained = weight.view(heads, -1, weight.shape[1])
        wide = out.view(self.shape.num_attention_heads, -1, weight.shape[1])[:heads]
        wide[:, :nope] = trained[:, :nope]
        wide[:, nope : self.shape.qk_nope_head_dim] = 0
        wide[:, self.shape.qk_nope_head_dim :] = trained[:, nope:]

    def _fill_out(self, out: Tensor, part: str, source: Source) -> None:
        self.hidden.fill_writer(out, source.find(part))

    def _fill_gate_up(self, out: Tensor, part: str, source: Source) -> None:
        out.normal_(std=NOISE)
        for half, wide in zip(("gate", "up"), out.chunk(2), strict=True):
            weight = source.find(part.replace("gate_up", half))
            if weight is not None:
                self.hidden.fill_reader(wide[: len(weight)], weight)

    def _fill_router(self, out: Tensor, part: str, source: Source) -> None:
        weight = source.find(part)
        mean = self.means[-1 if source.index is None else source.index]
        rows = torch.randn(len(out), self.hidden.size, device=out.device)
        unit = (mean / mean.norm()).to(out.device)
        rows -= (rows @ unit)[:, None] * unit
        out.normal_(std=NOISE)
        self.hidden.fill_reader(out, (rows / self.hidden.size**0.5).to(out.dtype))
        if weight is not None:
            self.hidden.fill_reader(out[: len(weight)], weight)

    def _fill_router_bias(self, out: Tensor, part: str, source: Source) -> None:
        weight = source.find(part)
        out.zero_()
        if weight is not None:
            out[: len(weight)] = weight

    def _fill_experts(self, out: Tensor, part: str, source: Source) -> None:
        is_down = part.endswith("w2_weight")
        self.hidden.fill_writer(out) if is_down else out.normal_(std=NOISE)
        for expert in range(self.config["n_routed_experts"]):
            base = f"mlp.experts.{expert}."
            if is_down:
                weight = source.find(f"{base}down_proj.weight")
                if weight is not None:
                    self.hidden.fill_writer(out[expert], weight)
            elif source.find(f"{base}up_proj.weight") is not None:
                self._fill_gate_up(out[expert], f"{base}gate_up_proj.weight", source)

    _methods: dict[str, Callable[..., None]] = {  # noqa: RUF012
        r"norm\.weight$": _fill_norm,
        r"embed_tokens\.weight$": _fill_embedding,
        r"head\.weight$": _fill_head,
        r"eh_proj\.weight$": _fill_eh,
        r"fused_qkv_a_proj\.weight$": _fill_qkv_a,
        r"q_b_proj\.weight$": _fill_q_b,
        r"kv_b_proj\.weight$": _fill_kv_b,
        r"(o_proj|down_proj)\.weight$": _fill_out,
        r"gate_up_proj\.weight$": _fill_gate_up,
        r"mlp\.gate\.weight$": _fill_router,
        r"e_score_correction_bias$": _fill_router_bias,
        r"experts\..*w(13|2)_weight$": _fill_experts,
    }
