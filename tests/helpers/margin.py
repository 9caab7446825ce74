"""The margin rule: where token ids may differ, and how much that proves."""

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
) -> list[str]:
    """Outputs that differ for another reason than a floating-point tie.

    At the first mismatch the common prefix is scored again without speculation: both
    tokens must lie within ``tolerance`` of each other, in log-probability. Returns one
    line per output that fails. ``params`` are needed where requests are sampled: their
    temperature scales the scores, and the noise of their seed is added.
    """
    from vllm import SamplingParams

    inputs, rows = [], []
    for i, (ours, theirs) in enumerate(zip(found, reference, strict=True)):
        if ours == theirs:
            continue
        first = next(
            (j for j, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            None,
        )
        if first is None:
            return [f"output {i}: lengths {len(ours)} and {len(theirs)}"]
        inputs.append({"prompt_token_ids": prompts[i] + theirs[:first]})
        rows.append((i, first, ours[first], theirs[first]))
    if not rows:
        return []
    settings = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    scored = reference_llm.generate(inputs, settings, use_tqdm=False)
    faults = []
    for (i, first, ours_id, theirs_id), output in zip(rows, scored, strict=True):
        top = {t: v.logprob for t, v in output.outputs[0].logprobs[0].items()}
        gap = top.get(theirs_id, 0.0) - top.get(ours_id, float("-inf"))
        scale = 1.0
        if params is not None and params[i].temperature > 0:
            scale = 1 / params[i].temperature
            position = len(prompts[i]) + first - 1
            noise = _noise(params[i].seed, position, (theirs_id, ours_id))
            gap = scale * gap + noise[0] - noise[1]
        if abs(gap) > tolerance * scale:
            faults.append(f"output {i}, token {first}: {gap:.3f} apart")
    return faults


def _noise(seed: int, position: int, tokens: tuple[int, int]) -> list[float]:
    import torch

    from tests.helpers.trees import target_noise

    found: list[float] = target_noise(seed, position, torch.tensor(tokens)).tolist()
    return found
