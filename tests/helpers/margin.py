"""The margin rule: where token ids may differ, and how much that proves."""

from dataclasses import dataclass
from typing import Any

BFLOAT16_LOGIT_TOLERANCE = 0.25
"""Two roundings to bfloat16 of logits below 32, which are 0.125 apart there."""

FLOAT16_LOGIT_TOLERANCE = 1 / 32
"""The same for float16, whose values are 1/64 apart there."""


def unequal_beyond_ties(
    reference_llm: Any,
    prompts: list[list[int]],
    reference: list[list[int]],
    found: list[list[int]],
    tolerance: float = BFLOAT16_LOGIT_TOLERANCE,
    params: list[Any] | None = None,
    measured: bool = False,
) -> list[str]:
    """Outputs that differ for another reason than a floating-point tie.

    At the first mismatch the common prefix is scored again without speculation, twice:
    as a prompt, and by decoding up to it once more. Both tokens must lie within
    ``tolerance`` of each other, in log-probability, by one of the two. With
    ``measured`` it is enough that they are no further apart than the two scores: how
    exact kernels are whose precision is not that of the logits (FP8 KV). Returns one
    line per output that fails.

    ``params`` are needed where requests are sampled: their temperature scales the
    scores, and the noise of their seed and their logit bias are added.
    """
    from vllm import SamplingParams

    try:
        splits = _find_splits(reference, found)
    except ValueError as error:
        return [str(error)]
    if not splits:
        return []
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    kinds = [params[s.output] if params else greedy for s in splits]
    as_prompt = _score_as_prompts(reference_llm, prompts, reference, splits)
    decoded = _score(
        reference_llm,
        [prompts[s.output] for s in splits],
        splits,
        kinds,
        [s.first for s in splits],
        [reference[s.output] for s in splits],
    )
    faults = []
    for split, kind, *scores in zip(splits, kinds, as_prompt, decoded, strict=True):
        scale, extra = 1.0, 0.0
        if kind.temperature > 0:
            scale = 1 / kind.temperature
            position = len(prompts[split.output]) + split.first - 1
            noise = _noise(kind.seed, position, (split.theirs, split.ours))
            extra = noise[0] - noise[1]
        bias = kind.logit_bias or {}
        extra += scale * (bias.get(split.theirs, 0.0) - bias.get(split.ours, 0.0))
        gaps = [scale * score + extra for score in scores if score is not None]
        exact = max(gaps) - min(gaps) if measured else 0.0
        if min(map(abs, gaps)) > max(tolerance * scale, exact):
            told = " and ".join(f"{gap:.3f}" for gap in gaps)
            faults.append(f"output {split.output}, token {split.first}: {told} apart")
    return faults


def score_splits(
    reference_llm: Any,
    prompts: list[list[int]],
    reference: list[list[int]],
    found: list[list[int]],
) -> list[float]:
    """How far both tokens are apart at the first difference of each greedy output."""
    splits = _find_splits(reference, found)
    scores = _score_as_prompts(reference_llm, prompts, reference, splits)
    return [abs(score) for score in scores if score is not None]


def _find_splits(reference: list[list[int]], found: list[list[int]]) -> list["Split"]:
    """Of every output that differs, where.

    Raises:
        ValueError: One is the front of the other.
    """
    splits = []
    for i, (ours, theirs) in enumerate(zip(found, reference, strict=True)):
        if ours == theirs:
            continue
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((j for j, (a, b) in pairs if a != b), None)
        if first is None:
            raise ValueError(f"output {i}: lengths {len(ours)} and {len(theirs)}")
        splits.append(Split(i, first, ours[first], theirs[first]))
    return splits


@dataclass(frozen=True)
class Split:
    """Where an output leaves the reference."""

    output: int
    first: int
    ours: int
    theirs: int


def _score_as_prompts(
    llm: Any,
    prompts: list[list[int]],
    reference: list[list[int]],
    splits: list[Split],
) -> list[float | None]:
    """``_score`` of the common prefixes."""
    from vllm import SamplingParams

    return _score(
        llm,
        [prompts[s.output] + reference[s.output][: s.first] for s in splits],
        splits,
        [SamplingParams(temperature=0, ignore_eos=True)] * len(splits),
        [0] * len(splits),
    )


def _score(
    llm: Any,
    prompts: list[list[int]],
    splits: list[Split],
    params: list[Any],
    places: list[int],
    expected: list[list[int]] | None = None,
) -> list[float | None]:
    """How far their token is before ours, at a place of the output, without noise.

    None where the output is not as ``expected`` before it.
    """
    asked = []
    for split, kind, place in zip(splits, params, places, strict=True):
        kind = kind.clone()
        kind.max_tokens, kind.logprobs = place + 1, None
        kind.min_tokens = min(kind.min_tokens, kind.max_tokens)
        kind.logprob_token_ids = [split.ours, split.theirs]
        asked.append(kind)
    inputs = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(inputs, asked, use_tqdm=False)
    found: list[float | None] = []
    for i, (split, place, output) in enumerate(
        zip(splits, places, outputs, strict=True)
    ):
        ids = list(output.outputs[0].token_ids)
        as_before = expected is None or ids[:place] == expected[i][:place]
        if not as_before or len(ids) <= place:
            found.append(None)
            continue
        scores = output.outputs[0].logprobs[place]
        found.append(scores[split.theirs].logprob - scores[split.ours].logprob)
    return found


def _noise(seed: int, position: int, tokens: tuple[int, int]) -> list[float]:
    import torch

    from tests.helpers.trees import target_noise

    found: list[float] = target_noise(seed, position, torch.tensor(tokens)).tolist()
    return found
