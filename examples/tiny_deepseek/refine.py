"""Teaches the trained model not to repeat itself when it decodes greedily.

    python refine.py --corpus corpus.npz --model model --out refined

A model this small falls into loops at temperature 0, and a loop is far too easy for any
drafter. Each update decodes greedily after prefixes of the training text and lowers the
probability of tokens that complete an n-gram seen before (sequence-level unlikelihood,
Welleck et al., arXiv 1908.04319), while the main model and the MTP layer go on
learning real text.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from checkpoint import load_model, save_model, write_json
from data import Corpus
from evaluate import evaluate, generate, load_prompts
from model import TinyDeepseek
from torch import Tensor
from train import HERE, NUM_DEPTHS, Settings, Trainer, compute_losses, log


@dataclasses.dataclass(frozen=True)
class RefineSettings:
    """Hyperparameters, all kept in `PROVENANCE.json`."""

    max_seconds: float = 65.0
    batch_tokens: int = 32_768
    num_prefixes: int = 256
    num_generated: int = 128
    ngram: int = 6
    learning_rate: float = 4e-4
    warmup_updates: int = 10
    unlikelihood_weight: float = 1.0
    mtp_weight: float = 0.3
    seed: int = 1


PREFIX_LENGTHS = (16, 48, 112, 200)


def find_repeats(ids: Tensor, ngram: int) -> Tensor:
    """Returns [batch, tokens], True where a token completes an earlier n-gram."""
    grams = ids.unfold(1, ngram, 1)
    powers = 1_000_003 ** torch.arange(ngram, device=ids.device)
    hashes, order = ((grams + 1) * powers).sum(-1).sort(dim=1, stable=True)
    seen = torch.zeros_like(hashes, dtype=torch.bool)
    seen[:, 1:] = hashes[:, 1:] == hashes[:, :-1]
    repeats = torch.zeros_like(ids, dtype=torch.bool)
    repeats[:, ngram - 1 :].scatter_(1, order, seen)
    return repeats


def compute_unlikelihood(
    model: TinyDeepseek, ids: Tensor, num_generated: int, ngram: int
) -> tuple[Tensor, float]:
    """Returns the mean of -log(1 - p) over repeats, and the share of repeats.

    Args:
        model: The model.
        ids: [batch, tokens], prefixes and what the model generated after them.
        num_generated: How many of the last tokens are generated.
        ngram: Length of the n-grams.
    """
    repeats = find_repeats(ids, ngram)[:, -num_generated:]
    device = ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model.lm_head(model(ids)[:, -num_generated - 1 : -1])
    probs = logits.float().softmax(-1)
    probs = probs.gather(-1, ids[:, -num_generated:, None]).squeeze(-1)
    costs = -torch.log1p(-probs.clamp(max=1 - 1e-5))
    return (costs * repeats).mean(), float(repeats.float().mean())


class Refiner:
    """One refinement run over a model that `train.py` wrote."""

    def __init__(self, settings: RefineSettings, corpus: Corpus, source: Path) -> None:
        self.settings = settings
        base = Settings(
            batch_tokens=settings.batch_tokens, seed=settings.seed, eval_batches=8
        )
        # Everything but the weights is as in training: data, optimiser, measuring.
        self.trainer = Trainer(base, corpus, source)
        self.model = self.trainer.model
        self.model.load_state_dict(load_model(source).state_dict())
        self.curve: list[dict[str, float]] = []

    def generate_batch(self, update: int) -> Tensor:
        """Returns [prefixes, tokens]: prefixes with the model's own continuation."""
        settings = self.settings
        length = PREFIX_LENGTHS[update % len(PREFIX_LENGTHS)]
        batches = self.trainer.train_batches
        windows = next(batches.iterate_epoch(256))
        prefixes = windows[:, :length]
        while len(prefixes) < settings.num_prefixes:
            windows = next(batches.iterate_epoch(256))
            prefixes = torch.cat([prefixes, windows[:, :length]])
        prefixes = prefixes[: settings.num_prefixes]
        self.model.eval()
        device = prefixes.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            new = generate(self.model, prefixes, settings.num_generated)
        return torch.cat([prefixes, new], dim=1)

    def update(self, index: int, progress: float, ids: Tensor) -> None:
        """Takes one step on real text and on the model's own."""
        settings, trainer = self.settings, self.trainer
        generated = self.generate_batch(index)
        self.model.train()
        rows = trainer.settings.context
        deep = trainer.settings.get_deep_rows(rows)
        block = int(torch.randint(rows // deep, ()))
        losses = compute_losses(self.model, ids, block * deep, deep)
        penalty, share = compute_unlikelihood(
            self.model, generated, settings.num_generated, settings.ngram
        )
        # The MTP layer has to follow the main model's changed habits as well.
        rows = generated.shape[1] - NUM_DEPTHS - 1
        deep = settings.num_generated // 2
        own_losses = compute_losses(self.model, generated, rows - deep, deep)
        mtp = losses[1:].mean() + own_losses[1:].mean()
        loss = losses[0] + settings.mtp_weight * mtp
        (loss + settings.unlikelihood_weight * penalty).backward()
        warmup = min(1.0, (index + 1) / settings.warmup_updates)
        for group in trainer.optimizer.param_groups:
            group["lr"] = settings.learning_rate * warmup * (1 - progress)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for moe in self.model.moe_layers():
            # The bias stays as trained: the generated text would skew the loads.
            moe.load.zero_()
        if index % 10 == 0:
            entry = {
                "update": index,
                "repeats": round(share, 4),
                "unlikelihood": round(penalty.item(), 4),
                "main": round(losses[0].item(), 4),
                "mtp": round(losses[1:].mean().item(), 4),
                "mtp_on_own_text": round(own_losses[1:].mean().item(), 4),
            }
            self.curve.append(entry)
            log(json.dumps(entry))

    def run(self) -> int:
        """Updates until the time is spent and returns the number of updates."""
        start, index = time.monotonic(), 0
        while True:
            for ids in self.trainer.train_batches.iterate_epoch(
                self.trainer.settings.context
            ):
                progress = (time.monotonic() - start) / self.settings.max_seconds
                if progress >= 1:
                    return index
                self.update(index, progress, ids)
                index += 1


def parse_settings() -> tuple[RefineSettings, argparse.Namespace]:
    """Reads the command line; each setting is an option of its own name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "refined")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.npz")
    for field in dataclasses.fields(RefineSettings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    args = parser.parse_args()
    names = [field.name for field in dataclasses.fields(RefineSettings)]
    return RefineSettings(**{name: getattr(args, name) for name in names}), args


def main() -> None:
    """Refines a model folder into another and completes its provenance."""
    settings, args = parse_settings()
    refiner = Refiner(settings, Corpus.load(args.corpus), args.model)
    num_updates = refiner.run()
    save_model(refiner.model, args.out)
    provenance = json.loads((args.model / "PROVENANCE.json").read_text())
    provenance["draft_chains_before_refinement"] = provenance.pop("draft_chains")
    trainer = refiner.trainer
    model = load_model(args.out).to(trainer.device)
    contexts = (trainer.settings.context, trainer.settings.long_context)
    provenance["refinement"] = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": trainer.hardware,
        "updates": num_updates,
        "settings": dataclasses.asdict(settings),
        "curve": refiner.curve,
        "losses_of_bf16_weights": {
            f"{part}_at_{context}": trainer.measure(model, part, context)
            for part in trainer.eval_rows
            for context in contexts
        },
    }
    write_json(args.out / "PROVENANCE.json", provenance)
    prompts = load_prompts(HERE / "prompts.json")[:32]
    provenance["draft_chains"] = evaluate(model, prompts, num_tokens=128)
    write_json(args.out / "PROVENANCE.json", provenance)
    log(json.dumps(provenance["draft_chains"]))


if __name__ == "__main__":
    main()
