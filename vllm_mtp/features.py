"""Which request features are served by trees, by chains or without drafts, and why.

The one table behind ``vllm-mtp explain`` and docs/configuration.md. What decides in the
engine is ``vllm_mtp.requests.needs_chain``; a test holds the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ServedBy(StrEnum):
    """How a request is drafted for. Its tokens are the same in every case."""

    TREE = "tree"
    CHAIN = "chain"
    """A tree with one branch (k = 1), in the same batches and graphs as trees."""

    NOTHING = "nothing"
    """No drafts in this step: one token per step, as without speculation."""


@dataclass(frozen=True)
class Feature:
    """One line of the table."""

    name: str
    served_by: ServedBy
    why: str

    example: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that ask for it; empty where it is none of them."""


_OWN_ROW = "depends on the row it is sampled at, and each row has its true position"
_LATER = "applied to the emitted tokens, after the verify pass"
_ANCESTORS = "looks back over prompt, output and the row's own ancestors"
_HISTORY = (
    "depends on the tokens before a row, which vLLM reads as if rows were a chain"
)

FEATURES = (
    Feature("greedy (temperature 0)", ServedBy.TREE, _OWN_ROW, {"temperature": 0.0}),
    Feature(
        "temperature, seed",
        ServedBy.TREE,
        "the noise is keyed by request seed, position and token, so a row draws what "
        "it would draw without speculation",
        {"temperature": 0.8, "seed": 7},
    ),
    Feature(
        "top_k, top_p, min_p",
        ServedBy.TREE,
        _OWN_ROW,
        {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ),
    Feature(
        "logit_bias, allowed_token_ids",
        ServedBy.TREE,
        _OWN_ROW,
        {"logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6]},
    ),
    Feature("min_tokens", ServedBy.TREE, _OWN_ROW, {"min_tokens": 4}),
    Feature(
        "logprobs, logprob_token_ids",
        ServedBy.TREE,
        "rows of the accepted path are reported in order, one per emitted token",
        {"logprobs": 3, "logprob_token_ids": [5, 6]},
    ),
    Feature(
        "stop, stop_token_ids, max_tokens, ignore_eos, repetition_detection",
        ServedBy.TREE,
        _LATER,
        {
            "stop": ["x"],
            "stop_token_ids": [5],
            "max_tokens": 4,
            "ignore_eos": True,
            "repetition_detection": {"max_pattern_size": 8, "min_count": 2},
        },
    ),
    Feature(
        "n > 1",
        ServedBy.TREE,
        "every sequence is a request with a seed and a tree of its own",
        {"n": 2},
    ),
    Feature(
        "presence, frequency and repetition penalties",
        ServedBy.TREE,
        _ANCESTORS,
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ),
    Feature("bad_words", ServedBy.TREE, _ANCESTORS, {"bad_words": ["x"]}),
    Feature(
        "structured output (JSON schema, regex, grammar)",
        ServedBy.CHAIN,
        "the grammar walks the drafts in row order, one state after the other",
        {"structured_outputs": {"regex": "[ab]+"}},
    ),
    Feature(
        "thinking_token_budget", ServedBy.CHAIN, _HISTORY, {"thinking_token_budget": 8}
    ),
    Feature(
        "custom logits processors",
        ServedBy.CHAIN,
        "may look back the same way; only requests that one of them claims "
        "(`add_request` returns true) are concerned",
    ),
    Feature(
        "prompt being read (prefill), prompt_logprobs",
        ServedBy.NOTHING,
        "drafting starts behind the first sampled token",
        {
            "prompt_logprobs": 1,
            "prompt_logprob_token_ids": [[5]],
            "prompt_logprob_start": 0,
        },
    ),
    Feature(
        "last tokens before max_model_len",
        ServedBy.NOTHING,
        "the scheduler cuts nodes, the least likely first, until none fits",
    ),
    Feature(
        "no room in max_num_batched_tokens",
        ServedBy.NOTHING,
        "the scheduler cuts nodes, the least likely first, until none fits",
    ),
)
"""In the order shown. A request with several of them is served by the least."""
