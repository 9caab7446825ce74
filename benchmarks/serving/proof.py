"""Shows that the inflated model says what the tiny one says: greedy ids of both."""

from typing import Any

from benchmarks.inflate import TINY
from tests.helpers.engine import engine
from tests.helpers.prompts import held_out

NUM_PROMPTS, NUM_TOKENS = 32, 64


def generate(llm: Any) -> list[Any]:
    """vLLM's outputs for held-out prompts, with the best two log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in held_out(NUM_PROMPTS)]
    return [each.outputs[0] for each in llm.generate(inputs, params, use_tqdm=False)]


def run_tiny(**settings: Any) -> list[Any]:
    """The tiny model's outputs, from an engine of its own."""
    sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
    with engine(
        None, model=str(TINY), skip_tokenizer_init=True, **{**settings, **sizes}
    ) as llm:
        outputs = generate(llm)
        del llm
    return outputs


def compare(inflated: list[Any], tiny: list[Any]) -> dict[str, Any]:
    """Counts equal outputs, and how sure the tiny model was where others part.

    Two models whose arithmetic differs in the last bit of bfloat16 may part where the
    best two tokens are all but equal, and nowhere else: ``largest_margin`` is the
    greatest difference of their log-probabilities at such a place.
    """
    margins, errors, same = [], [], 0
    for ours, theirs in zip(inflated, tiny, strict=True):
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        for index in range(len(pairs) if first is None else first):
            token = theirs.token_ids[index]
            difference = (
                ours.logprobs[index][token].logprob
                - theirs.logprobs[index][token].logprob
            )
            errors.append(abs(difference))
        if first is None:
            same += 1
            continue
        best = sorted(
            (p.logprob for p in theirs.logprobs[first].values()), reverse=True
        )
        margins.append(best[0] - best[1])
    return {
        "prompts": len(inflated),
        "tokens": NUM_TOKENS,
        "same": same,
        "largest_margin": round(max(margins, default=0.0), 4),
        "mean_logprob_error": sum(errors) / max(len(errors), 1),
    }
