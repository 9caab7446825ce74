"""Logits processors of others: chains for the requests they claim, the same tokens."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.prompts import held_out


class NoReturn(LogitsProcessor):  # type: ignore[misc]
    """Forbids to go back to the token before the last: no A B A.

    A row's last token is the one fed into it, the token before is that of the row
    before it, as in vLLM's own processors.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states
        self.slots: set[int] = set()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        wanted = (sampling_params.extra_args or {}).get("no_return", True)
        if not isinstance(wanted, bool):
            raise ValueError(f"no_return={wanted!r} is not true or false")

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        wanted = bool((sampling_params.extra_args or {}).get("no_return"))
        (self.slots.add if wanted else self.slots.discard)(req_idx)
        return wanted

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.tolist()
        for row, (slot, place) in enumerate(
            zip(slots, ctx.expanded_local_pos.tolist(), strict=True)
        ):
            if slot not in self.slots:
                continue
            if place > 0:
                before = int(ctx.input_ids[row - 1])
            else:
                length = int(self.states.total_len.gpu[slot])
                before = int(self.states.all_token_ids.gpu[slot, length - 2])
            logits[row, before] = float("-inf")
        return logits


SETTINGS: dict[str, Any] = {"logits_processors": [NoReturn], "max_num_seqs": 6}
CLAIMED = [True, True, False, True, False, True]


def requests() -> tuple[list[list[int]], list[Any]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            # Penalties and the processor together.
            presence_penalty=0.4 * (i == 5),
            extra_args={"no_return": claimed},
        )
        for i, claimed in enumerate(CLAIMED)
    ]
    return held_out(6, (9, 20, 33)), params


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    with engine(**SETTINGS) as llm:
        return generate(llm, *requests())


@pytest.fixture(scope="module")
def trees(reference: list[list[int]]) -> Iterator[Any]:
    with engine(mtp_tree(3, 4, 7), **SETTINGS) as llm:
        yield llm


def test_ids_equal_no_speculation(trees: Any, reference: list[list[int]]) -> None:
    """Catches: a tree whose rows take an uncle for the token before."""
    ids = generate(trees, *requests())
    assert ids == reference
    for tokens, claimed in zip(ids, CLAIMED, strict=True):
        returns = any(a == b for a, b in zip(tokens, tokens[2:], strict=False))
        assert not (claimed and returns)
    assert int(runner_of(trees).tree.chain_only.sum()) == sum(CLAIMED)


def test_a_slot_is_a_tree_again_when_its_next_request_is_not_claimed(
    trees: Any,
) -> None:
    prompts, params = requests()
    for p in params:
        p.extra_args = {"no_return": False}
    generate(trees, prompts, params)
    assert not runner_of(trees).tree.chain_only.any()


def test_wrong_arguments_are_refused_with_the_reason(trees: Any) -> None:
    prompts, params = requests()
    params[0].extra_args = {"no_return": "maybe"}
    with pytest.raises(
        VLLMValidationError, match="no_return='maybe' is not true or false"
    ):
        generate(trees, prompts[:1], params[:1])


def test_a_thinking_budget_without_thinking_is_refused(trees: Any) -> None:
    prompts, params = requests()
    params[0].thinking_token_budget = 3
    with pytest.raises(VLLMValidationError, match="reasoning_config is not configured"):
        generate(trees, prompts[:1], params[:1])
