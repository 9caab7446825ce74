"""Measures how well the MTP layer drafts for the model's own greedy output.

    python evaluate.py [--model model] [--prompts prompts.json] [--num-prompts 32]

For every position of the generated text the chain of greedy drafts is computed; walking
through them gives exactly the steps that an engine with chain drafting would take.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoint import load_model
from data import BOS_ID, Corpus
from model import CachedAttend, TinyDeepseek
from torch import Tensor
from unroll import UnrolledAttend

HERE = Path(__file__).parent
NUM_DRAFTS = 4
TOP_KS = (1, 2, 4)
NGRAM = 8


@dataclasses.dataclass
class Sample:
    """One greedy generation and what the chain drafted along it."""

    # [generated], the tokens after the prompt.
    generated: list[int]
    # [generated - 1][NUM_DRAFTS], True where a draft equals the generated token.
    hits: list[list[bool]]
    # [generated - 1], rank of the right token among the first drafts (capped).
    ranks: list[int]

    def count_steps(self, num_drafts: int) -> int:
        """Counts verify steps after the first token with `num_drafts` a step."""
        steps, row = 0, 0
        while row < len(self.hits):
            accepted = 0
            while accepted < num_drafts and self.hits[row][accepted]:
                accepted += 1
            steps, row = steps + 1, row + accepted + 1
        return steps

    @property
    def repeated_share(self) -> float:
        """Share of n-grams that occurred before in the same generation."""
        tokens = self.generated
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        return 1 - len(set(grams)) / len(grams)

    @property
    def collapsed(self) -> bool:
        """Whether the last half repeats with a period of at most 16 tokens."""
        tail = self.generated[len(self.generated) // 2 :]
        return any(tail[period:] == tail[:-period] for period in range(1, 17))


@torch.no_grad()
def generate(model: TinyDeepseek, prompts: Tensor, num_tokens: int) -> Tensor:
    """Decodes greedily, past EOS too.

    Args:
        model: The model.
        prompts: [batch, tokens].
        num_tokens: How many tokens to generate.

    Returns:
        The new tokens, [batch, num_tokens].
    """
    attends = [CachedAttend() for _ in model.layers]
    ids, start, out = prompts, 0, []
    for _ in range(num_tokens):
        hidden = model(ids, start, list(attends))
        start += ids.shape[1]
        ids = model.lm_head(hidden[:, -1:]).argmax(-1)
        out.append(ids)
    return torch.cat(out, dim=1)


@torch.no_grad()
def draft_chains(
    model: TinyDeepseek, ids: Tensor, num_origins: int
) -> tuple[Tensor, Tensor]:
    """Drafts a greedy chain after each of the last tokens.

    Args:
        model: The model.
        ids: [1, tokens].
        num_origins: How many of the last tokens to draft after.

    Returns:
        The drafts [origins, NUM_DRAFTS], and the logits of the first [origins, vocab].
    """
    first = ids.shape[1] - 1 - num_origins
    attend = UnrolledAttend(first)
    hidden = model.draft(0, ids[:, 1:], model(ids[:, :-1]), attend)[:, first:]
    first_logits = model.lm_head(hidden)
    drafts = [first_logits.argmax(-1)]
    for depth in range(1, NUM_DRAFTS):
        hidden = model.draft(first + depth, drafts[-1], hidden, attend)
        drafts.append(model.lm_head(hidden).argmax(-1))
    return torch.stack(drafts, dim=-1)[0], first_logits[0]


def sample(model: TinyDeepseek, prompt: Sequence[int], num_tokens: int) -> Sample:
    """Generates from a prompt and compares the drafts with what came."""
    prompt_ids = torch.tensor([prompt], device=model.lm_head.weight.device)
    new = generate(model, prompt_ids, num_tokens)
    ids, generated = torch.cat([prompt_ids, new], dim=1), new[0].tolist()
    # The last token has nothing after it to compare with.
    drafts, logits = draft_chains(model, ids[:, :-1], num_tokens - 1)
    hits, ranks = [], []
    for row in range(num_tokens - 1):
        right = generated[row + 1 : row + 1 + NUM_DRAFTS]
        row_hits = [a == b for a, b in zip(drafts[row].tolist(), right, strict=False)]
        hits.append(row_hits + [False] * (NUM_DRAFTS - len(row_hits)))
        ranks.append(int((logits[row] > logits[row, right[0]]).sum()))
    return Sample(generated, hits, ranks)


def summarise(samples: list[Sample]) -> dict[str, object]:
    """Pools samples into accept lengths, hit rates and repetition."""
    ranks = [rank for item in samples for rank in item.ranks]
    return {
        "num_prompts": len(samples),
        "num_generated": len(samples[0].generated),
        "accept_length": {
            str(num_drafts): round(
                len(ranks) / sum(item.count_steps(num_drafts) for item in samples), 3
            )
            for num_drafts in range(1, NUM_DRAFTS + 1)
        },
        "first_draft_in_top": {
            str(k): round(sum(rank < k for rank in ranks) / len(ranks), 3)
            for k in TOP_KS
        },
        "repeated_8gram_share": round(
            sum(item.repeated_share for item in samples) / len(samples), 3
        ),
        "collapsed_share": round(
            sum(item.collapsed for item in samples) / len(samples), 3
        ),
    }


def evaluate(
    model: TinyDeepseek, prompts: list[list[int]], num_tokens: int
) -> dict[str, object]:
    """Measures all prompts, and once more those whose output did not collapse."""
    samples = [sample(model, prompt, num_tokens) for prompt in prompts]
    lively = [item for item in samples if not item.collapsed]
    result = summarise(samples)
    if lively:
        result["without_collapsed"] = summarise(lively)
    return result


def load_prompts(path: Path) -> list[list[int]]:
    """Reads the token ids of `prompts.json`."""
    return [prompt["token_ids"] for prompt in json.loads(path.read_text())]


def cut_long_prompts(corpus: Corpus, num_prompts: int, length: int) -> list[list[int]]:
    """Cuts prompts of one length from the held-out tokens, evenly spread."""
    stride = len(corpus.held_out) // num_prompts
    return [
        [BOS_ID, *corpus.held_out[index * stride :][: length - 1].tolist()]
        for index in range(num_prompts)
    ]


def main() -> None:
    """Prints the measurements of one model folder as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.json")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--corpus", type=Path, help="for prompts of --length tokens")
    parser.add_argument("--length", type=int, default=8000)
    args = parser.parse_args()
    if args.corpus is None:
        prompts = load_prompts(args.prompts)[: args.num_prompts]
    else:
        corpus = Corpus.load(args.corpus)
        prompts = cut_long_prompts(corpus, args.num_prompts, args.length)
    result = evaluate(load_model(args.model), prompts, args.num_tokens)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
