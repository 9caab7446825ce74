"""Which requests get a tree and which a chain."""

from typing import Any


def needs_chain(params: Any) -> bool:
    """Whether a request's ``SamplingParams`` can only be served along a chain.

    A grammar and a thinking budget walk the drafts in row order, one state after the
    other. So may a logits processor of others, which ``vllm_mtp.history`` watches.
    Everything else depends on a row alone, or on its ancestors, which the same module
    finds in the tree.
    """
    return bool(
        params.structured_outputs is not None
        or getattr(params, "thinking_token_budget", None) is not None
    )
