"""Which requests get a tree and which a chain."""

from typing import Any


def needs_chain(params: Any) -> bool:
    """Whether a request's ``SamplingParams`` depend on the tokens before a row.

    Upstream's code for these reads a row's history off the rows before it, which holds
    for a chain only. Temperature, top-k, top-p, min-p, seed, logit bias, allowed
    tokens, minimum length and log-probabilities depend on the row alone.
    """
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.structured_outputs is not None
        or getattr(params, "thinking_token_budget", None) is not None
    )
