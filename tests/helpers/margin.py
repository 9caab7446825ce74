"""The margin rule: where token ids may differ, and how much that proves."""

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

from tests.helpers.controls import controls

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

    At the first mismatch the common prefix is computed again without speculation: as a
    prompt, by decoding up to it once more, and, where these two do not settle it, as
    ``controls`` do. One of them must draw our token there, or another one that leads
    it by no more than ``tolerance`` in log-probability. With ``measured`` it is enough
    that the lead is no larger than the first two computations are apart: how exact
    kernels are whose precision is not that of the logits (FP8 KV). Returns one line
    per output that fails.

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
    prefixes = [prompts[s.output] + reference[s.output][: s.first] for s in splits]
    asked = [_behind(k, s.first) for k, s in zip(kinds, splits, strict=True)]
    as_prompt = _score(reference_llm, prefixes, splits, asked, [0] * len(splits))
    decoded = _score(
        reference_llm,
        [prompts[s.output] for s in splits],
        splits,
        kinds,
        [s.first for s in splits],
        [reference[s.output] for s in splits],
    )
    faults = []
    for split, prefix, kind, *both in zip(
        splits, prefixes, asked, as_prompt, decoded, strict=True
    ):
        scores = [score for score in both if score is not None]
        gaps = [score.gap for score in scores]
        exact = max(gaps) - min(gaps) if measured else 0.0
        most = max(tolerance / (kind.temperature or 1.0), exact)
        if min(score.lead for score in scores) <= most:
            continue
        with contextlib.closing(controls(reference_llm)) as runs:
            for name, copies in runs:
                again = _score(
                    reference_llm,
                    [prefix] * copies,
                    [split] * copies,
                    [kind] * copies,
                    [0] * copies,
                    salt=name,
                )
                scores += [score for score in again if score is not None]
                if min(score.lead for score in scores) <= most:
                    break
            else:
                leads = sorted(score.lead for score in scores)
                where = f"output {split.output}, token {split.first}"
                faults.append(
                    f"{where}: {leads[0]:.3f} to {leads[-1]:.3f} behind in "
                    f"{len(leads)} computations"
                )
    return faults


def score_splits(
    reference_llm: Any,
    prompts: list[list[int]],
    reference: list[list[int]],
    found: list[list[int]],
) -> list[float]:
    """How far both tokens are apart at the first difference of each greedy output."""
    from vllm import SamplingParams

    splits = _find_splits(reference, found)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    scores = _score(
        reference_llm,
        [prompts[s.output] + reference[s.output][: s.first] for s in splits],
        splits,
        [greedy] * len(splits),
        [0] * len(splits),
    )
    return [abs(score.gap) for score in scores if score is not None]


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


@dataclass(frozen=True)
class Score:
    """Two leads over our token, with temperature, bias and the seed's noise."""

    gap: float
    """Of the reference's token; below 0 where ours is before it."""

    lead: float
    """Of the token drawn."""


def _behind(kind: Any, first: int) -> Any:
    """What draws the first token of a prompt as ``kind`` does the output's ``first``.

    Of temperature, seed, bias and minimum length only: the rest looks back.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=kind.temperature,
        seed=kind.seed,
        logit_bias=kind.logit_bias,
        min_tokens=int(kind.min_tokens > first),
        max_tokens=1,
        stop_token_ids=kind.stop_token_ids,
        ignore_eos=kind.ignore_eos,
    )


def _score(
    llm: Any,
    prompts: list[list[int]],
    splits: list[Split],
    params: list[Any],
    places: list[int],
    expected: list[list[int]] | None = None,
    salt: str | None = None,
) -> list[Score | None]:
    """How both tokens stand at a place of the output.

    None where the output is not as ``expected`` before it. With ``salt`` no cached
    prefix is read, and what this leaves in the cache is never read either.
    """
    asked = []
    for split, kind, place in zip(splits, params, places, strict=True):
        kind = kind.clone()
        kind.max_tokens, kind.logprobs = place + 1, None
        kind.min_tokens = min(kind.min_tokens, kind.max_tokens)
        kind.logprob_token_ids = [split.ours, split.theirs]
        asked.append(kind)
    inputs: list[dict[str, Any]] = [{"prompt_token_ids": p} for p in prompts]
    for one in inputs if salt is not None else ():
        one["cache_salt"] = f"{salt} {next(_uses)}"
    outputs = llm.generate(inputs, asked, use_tqdm=False)
    found: list[Score | None] = []
    for i, (split, kind, place, output) in enumerate(
        zip(splits, params, places, outputs, strict=True)
    ):
        ids = list(output.outputs[0].token_ids)
        as_before = expected is None or ids[:place] == expected[i][:place]
        if not as_before or len(ids) <= place:
            found.append(None)
            continue
        logprobs = output.outputs[0].logprobs[place]
        tokens = (split.ours, split.theirs, ids[place])
        position = len(prompts[i]) + place - 1
        bias = kind.logit_bias or {}
        values = [logprobs[t].logprob + bias.get(t, 0.0) for t in tokens]
        if kind.temperature > 0:
            noise = _noise(kind.seed, position, tokens)
            values = [
                v / kind.temperature + n for v, n in zip(values, noise, strict=True)
            ]
        ours, theirs, drawn = values
        found.append(Score(gap=theirs - ours, lead=drawn - ours))
    return found


_uses = itertools.count()


def _noise(seed: int, position: int, tokens: tuple[int, ...]) -> list[float]:
    import torch

    from tests.helpers.trees import target_noise

    found: list[float] = target_noise(seed, position, torch.tensor(tokens)).tolist()
    return found
