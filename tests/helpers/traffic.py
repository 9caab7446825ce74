"""Random traffic from a seed: prompts, parameters, arrivals, aborts, tiny pools."""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.conftest import GPUS
from tests.helpers.prompts import held_out

VOCAB_SIZE = 2048
LONGEST_PROMPT = 300 if GPUS else 90
MOST_TOKENS = 120 if GPUS else 32


@dataclass
class Round:
    """Requests that are served together."""

    requests: dict[str, tuple[list[int], Any]] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    aborts: dict[str, int] = field(default_factory=dict)
    budget: int = 2048
    """Tokens a step."""

    num_tokens: int = 0
    """KV that the pool must hold at least: the longest request's."""

    spare_tokens: int = 0
    """KV that it holds beyond that."""


def make_round(seed: int, count: int) -> Round:
    """The round of ``seed``: the same on every machine of a kind."""
    rng = random.Random(seed)
    texts = [p for p in held_out(48) if len(p) > 12]
    shared = rng.choice(texts) * 3
    found = Round(
        budget=rng.choice((3, 9, 17, 40, 128, 2048, 2048, 2048)),
        spare_tokens=rng.choice((0, 0, 16, 32, 100_000)),
    )
    for i in range(count):
        name = f"s{seed}-{i}"
        prompt = _prompt(rng, texts, shared)
        params = _params(rng)
        found.requests[name] = (prompt, params)
        found.arrivals[name] = rng.choice((0, 0, rng.randrange(40)))
        if rng.random() < 0.2:
            found.aborts[name] = found.arrivals[name] + rng.randrange(
                1, 40 if GPUS else 8
            )
        longest = len(prompt) + params.max_tokens
        found.num_tokens = max(found.num_tokens, longest)
    return found


def _prompt(rng: random.Random, texts: list[list[int]], shared: list[int]) -> list[int]:
    length = rng.choice((1, rng.randint(1, 12), rng.randint(1, LONGEST_PROMPT)))
    kind = rng.random()
    if kind < 0.3:
        return shared[:length]
    if kind < 0.4:
        return [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    text = 3 * rng.choice(texts)
    start = rng.randrange(len(text) // 3)
    return text[start : start + length] or text[:length]


def _params(rng: random.Random) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.5, 0.8, 1.0, 1.3)),
        "seed": rng.randrange(1 << 31),
        "max_tokens": rng.choice(
            (1, 2, *(rng.randint(3, MOST_TOKENS) for _ in range(4)))
        ),
        "ignore_eos": rng.random() < 0.7,
    }
    if rng.random() < 0.2:
        settings["logit_bias"] = {
            rng.randrange(VOCAB_SIZE): rng.choice((-100.0, 2.0)) for _ in range(5)
        }
    if rng.random() < 0.2:
        tokens = sorted(rng.sample(range(2, VOCAB_SIZE), 64))
        settings["stop_token_ids"] = tokens
        settings["min_tokens"] = rng.randint(0, settings["max_tokens"])
    if not GPUS:
        # Ties in bfloat16 can be told from faults for the parameters above only.
        if rng.random() < 0.3:
            settings["top_k"] = rng.choice((1, 5, 50))
            settings["top_p"] = rng.choice((0.7, 0.95))
        if rng.random() < 0.1:
            settings["min_p"] = 0.1
        if rng.random() < 0.3:
            settings["presence_penalty"] = rng.choice((0.0, 0.8))
            settings["frequency_penalty"] = rng.choice((0.0, 0.5))
            settings["repetition_penalty"] = rng.choice((1.0, 1.2))
        if rng.random() < 0.2:
            settings["logprobs"] = rng.choice((0, 1, 5))
        if rng.random() < 0.15:
            regex = rng.choice((r"[ -~\n]{4,40}", r"[a-z_]{2,9}\.[a-z]{3,20}"))
            settings["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return SamplingParams(**settings)
