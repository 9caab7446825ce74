"""Trains the tiny model and its MTP layer, and writes the checkpoint.

    python train.py --docs python-docs/_sources --corpus corpus.npz --out model

builds the corpus first if `corpus.npz` is not there. The MTP layer is unrolled over its
own output with shared weights, as a draft chain uses it. The schedule runs by whichever
is spent first, epochs or seconds, so a slower machine gets a shorter training.
"""

import argparse
import dataclasses
import datetime
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint import load_model, save_model, write_json
from config import ModelConfig
from data import BOS_ID, Corpus, build_corpus
from evaluate import evaluate, load_prompts
from model import TinyDeepseek
from torch import Tensor, nn
from unroll import UnrolledAttend

HERE = Path(__file__).parent
NUM_DEPTHS = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hyperparameters, all kept in `PROVENANCE.json`."""

    max_seconds: float = 330.0
    max_epochs: float = 32.0
    batch_tokens: int = 65_536
    context: int = 1024
    long_context: int = 8192
    # Share of the schedule that is trained at `long_context`.
    long_share: float = 0.15
    learning_rate: float = 3e-3
    final_lr_share: float = 0.02
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.05
    mtp_weight: float = 0.3
    late_mtp_weight: float = 0.1
    late_share: float = 0.3
    bias_update_rate: float = 1e-3
    eval_batches: int = 4
    seed: int = 0

    def get_deep_rows(self, context: int) -> int:
        """Returns how many origins of a window the deeper drafts are trained on."""
        return max(context // 8, min(context, self.context) // 2)

    def get_lr(self, step: int, progress: float) -> float:
        """Returns the learning rate: a warm-up, then a cosine."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
        floor = self.final_lr_share
        share = floor + (1 - floor) * cosine
        return self.learning_rate * share * min(1.0, (step + 1) / self.warmup_steps)


class Batches:
    """Windows of a token row; each starts with BOS and reaches past its labels."""

    def __init__(self, tokens: Tensor, batch_tokens: int, seed: int) -> None:
        self.tokens = tokens
        self.batch_tokens = batch_tokens
        self.generator = torch.Generator().manual_seed(seed)

    def iterate_epoch(self, context: int) -> Iterator[Tensor]:
        """Yields [windows, context + NUM_DEPTHS + 1], once over, in random order."""
        length = context + NUM_DEPTHS
        phase = torch.randint(context, (1,), generator=self.generator)
        starts = torch.arange(int(phase), len(self.tokens) - length, context)
        starts = starts[torch.randperm(len(starts), generator=self.generator)]
        num_windows = self.batch_tokens // context
        offsets = torch.arange(length, device=self.tokens.device)
        for batch in starts.to(self.tokens.device).split(num_windows):
            if len(batch) < num_windows:
                return
            ids = self.tokens[batch[:, None] + offsets].long()
            yield nn.functional.pad(ids, (1, 0), value=BOS_ID)


def compute_losses(model: TinyDeepseek, ids: Tensor, first: int, deep: int) -> Tensor:
    """Returns the cross-entropies of the main head and of each draft depth, in nats.

    Args:
        model: The model.
        ids: [batch, rows + NUM_DEPTHS + 1].
        first: First origin of the draft depths behind the first.
        deep: Number of their origins.
    """
    rows = ids.shape[1] - NUM_DEPTHS - 1
    device = ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model(ids[:, :rows])
        losses = [compute_cross_entropy(model, hidden, ids[:, 1 : rows + 1])]
        attend, begin, end = UnrolledAttend(first), 0, rows
        for depth in range(NUM_DEPTHS):
            position = begin + depth
            given = ids[:, position + 1 : end + depth + 1]
            wanted = ids[:, position + 2 : end + depth + 2]
            hidden = model.draft(position, given, hidden, attend)
            losses.append(compute_cross_entropy(model, hidden, wanted))
            if depth == 0:
                begin, end = first, first + deep
                hidden = hidden[:, begin:end]
    return torch.stack(losses)


def compute_cross_entropy(
    model: TinyDeepseek, hidden: Tensor, labels: Tensor
) -> Tensor:
    """Returns the mean negative log-likelihood of the labels."""
    logits = model.lm_head(hidden).flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), labels.flatten())


class Trainer:
    """One training run: model, optimiser, schedule and log."""

    def __init__(self, settings: Settings, corpus: Corpus, out: Path) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.out = settings, out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = TinyDeepseek(ModelConfig(), settings.dropout)
        self.model = model.to(self.device)
        decayed = [weight for weight in model.parameters() if weight.ndim > 1]
        others = [weight for weight in model.parameters() if weight.ndim == 1]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), eps=1e-9, fused=self.device.type == "cuda"
        )
        train = torch.from_numpy(corpus.train.astype("int32")).to(self.device)
        held_out = torch.from_numpy(corpus.held_out.astype("int32")).to(self.device)
        self.num_train_tokens = len(train)
        self.train_batches = Batches(train, settings.batch_tokens, settings.seed)
        self.eval_rows = {"train": train[-len(held_out) :], "held_out": held_out}
        self.step, self.epochs = 0, 0.0
        self.curve: list[dict[str, object]] = []
        self.best = math.inf
        self.start = time.monotonic()

    @property
    def hardware(self) -> str:
        """Name of the device that trains."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name() if on_gpu else "CPU"

    @property
    def seconds(self) -> float:
        """Wall-clock time since the run began."""
        return time.monotonic() - self.start

    @property
    def progress(self) -> float:
        """Share of the schedule that is behind us."""
        settings = self.settings
        return max(
            self.seconds / settings.max_seconds, self.epochs / settings.max_epochs
        )

    def train_step(self, ids: Tensor) -> Tensor:
        """Takes one optimiser step and returns the losses."""
        settings, progress = self.settings, self.progress
        self.model.train()
        rows = ids.shape[1] - NUM_DEPTHS - 1
        deep = settings.get_deep_rows(rows)
        block = int(torch.randint(rows // deep, ()))
        losses = compute_losses(self.model, ids, block * deep, deep)
        late = progress > 1 - settings.late_share
        weight = settings.late_mtp_weight if late else settings.mtp_weight
        (losses[0] + weight * losses[1:].mean()).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.get_lr(self.step, progress)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for moe in self.model.moe_layers():
            moe.update_bias(settings.bias_update_rate)
        self.step += 1
        self.epochs += settings.batch_tokens / self.num_train_tokens
        return losses.detach()

    @torch.no_grad()
    def measure(self, model: TinyDeepseek, part: str, context: int) -> list[float]:
        """Returns mean losses of a few fixed batches of a part."""
        model.eval()
        settings = self.settings
        batches = Batches(self.eval_rows[part], settings.batch_tokens, seed=1)
        totals: list[Tensor] = []
        for ids in batches.iterate_epoch(context):
            deep = settings.get_deep_rows(context)
            for first in (0, context - deep):
                totals.append(compute_losses(model, ids, first, deep))
            if len(totals) == 2 * settings.eval_batches:
                break
        return [round(x, 4) for x in torch.stack(totals).mean(0).tolist()]

    def record(self, context: int) -> None:
        """Logs the losses and saves the weights if the held-out loss is the best."""
        entry: dict[str, object] = {
            "epochs": round(self.epochs, 2),
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "context": context,
        }
        for part in self.eval_rows:
            entry[part] = self.measure(self.model, part, self.settings.context)
        losses = self.measure(self.model, "held_out", self.settings.context)
        score = losses[0] + self.settings.late_mtp_weight * sum(losses[1:]) / NUM_DEPTHS
        # The long-context weights replace the short-context ones whatever the score.
        if context != self.settings.context and not self.curve[-1]["long"]:
            self.best = math.inf
        entry["long"] = context != self.settings.context
        if score < self.best:
            self.best = score
            save_model(self.model, self.out)
            entry["saved"] = True
        self.curve.append(entry)
        log(json.dumps(entry))

    def run(self) -> None:
        """Trains at the short context, then at the long one."""
        settings = self.settings
        phases = (
            (settings.context, 1 - settings.long_share),
            (settings.long_context, 1.0),
        )
        for context, end in phases:
            while self.progress < end:
                for ids in self.train_batches.iterate_epoch(context):
                    self.train_step(ids)
                    if self.progress >= end:
                        break
                self.record(context)


def log(message: str) -> None:
    """Prints with a time stamp, at once."""
    print(f"{datetime.datetime.now():%H:%M:%S} {message}", flush=True)


def build_provenance(
    trainer: Trainer, corpus: Corpus, model: TinyDeepseek
) -> dict[str, Any]:
    """Returns everything worth knowing about the weights in the output folder."""
    settings = trainer.settings
    contexts = (settings.context, settings.long_context)
    return {
        "what": "DeepSeek-V3 architecture with one MTP layer, for tests and examples",
        "data": {
            "source": "CPython 3.11: standard library (Lib, tests included) and "
            "documentation sources (Doc)",
            "licence": "Python Software Foundation License Version 2; "
            "documentation examples also Zero-Clause BSD",
            "train_tokens": len(corpus.train),
            "held_out_tokens": len(corpus.held_out),
            "split": "whole files, by hash of the name; see data.py",
        },
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "training": {
            "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
            "hardware": trainer.hardware,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "date": f"{datetime.date.today()}",
            "seconds": round(trainer.seconds, 1),
            "steps": trainer.step,
            "epochs": round(trainer.epochs, 2),
            "settings": dataclasses.asdict(settings),
        },
        "losses": {
            "unit": "nats per token: main head, then draft depths 1 to 4",
            "bf16_weights": {
                f"{part}_at_{context}": trainer.measure(model, part, context)
                for part in trainer.eval_rows
                for context in contexts
            },
            "curve": trainer.curve,
        },
    }


def parse_settings() -> tuple[Settings, argparse.Namespace]:
    """Reads the command line; each setting is an option of its own name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.npz")
    parser.add_argument("--docs", type=Path, help="Python's documentation sources")
    for field in dataclasses.fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    args = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Settings)]
    return Settings(**{name: getattr(args, name) for name in names}), args


def main() -> None:
    """Builds what is missing, trains, and measures the rounded weights."""
    settings, args = parse_settings()
    if not args.corpus.exists():
        log("building the corpus and the tokenizer")
        vocab_size = ModelConfig().vocab_size
        build_corpus(HERE / "model", args.corpus, args.docs, vocab_size)
    corpus = Corpus.load(args.corpus)
    trainer = Trainer(settings, corpus, args.out)
    log(f"{len(corpus.train)} tokens, {len(corpus.held_out)} held out")
    trainer.run()
    model = load_model(args.out).to(trainer.device)
    provenance = build_provenance(trainer, corpus, model)
    write_json(args.out / "PROVENANCE.json", provenance)
    log("measuring draft chains")
    prompts = load_prompts(HERE / "prompts.json")
    provenance["draft_chains"] = evaluate(model, prompts[:32], num_tokens=128)
    write_json(args.out / "PROVENANCE.json", provenance)
    log(json.dumps(provenance["draft_chains"]))


if __name__ == "__main__":
    main()
