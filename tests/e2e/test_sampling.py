"""Every sampling parameter on trees: ids and log-probabilities of no speculation."""

import math
import os
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine, runner_of
from tests.helpers.prompts import held_out

TOKENS = 128 if GPUS or os.environ.get("VLLM_MTP_FULL_TESTS") else 32
"""Interpreted, vLLM's own sampling kernels cost most of the time here."""

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.9, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "logit_bias": {"temperature": 0.0, "logit_bias": {53: 3.0, 199: -100.0}},
    "allowed_token_ids": {"temperature": 0.7, "allowed_token_ids": list(range(2, 500))},
    "min_tokens": {"temperature": 0.0, "min_tokens": 16, "stop_token_ids": [199]},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 1.0},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.0},
    "repetition_penalty": {"temperature": 0.8, "repetition_penalty": 1.3},
    "bad_words": {"temperature": 0.0, "bad_words": ["self", "self.assert", "return"]},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "sampled_logprobs": {"temperature": 0.8, "logprobs": 2, "prompt_logprobs": 1},
    "n": {"temperature": 0.8, "n": 2},
    "all_penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "top_p": 0.95,
    },
}
"""Named by the parameter under test; every request is seeded."""

BATCHES = [list(PARAMS)[:8], list(PARAMS)[8:]]


def run(llm: Any, names: list[str], tokens: int = TOKENS) -> dict[str, Any]:
    """Generate one batch; per parameter (ids, log-probabilities, prompt's)."""
    from vllm import SamplingParams

    prompts = held_out(48)
    inputs, params = [], []
    for name in names:
        index = list(PARAMS).index(name)
        inputs.append({"prompt_token_ids": prompts[index][:40]})
        settings = {"seed": 17 + index, "max_tokens": tokens, **PARAMS[name]}
        params.append(SamplingParams(**settings))
    found = {}
    outputs = llm.generate(inputs, params, use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        found[name] = (
            [list(c.token_ids) for c in output.outputs],
            [_values(c.logprobs) for c in output.outputs],
            [_values(output.prompt_logprobs)],
        )
    return found


def _values(logprobs: Any) -> list[dict[int, float]] | None:
    """One dictionary per token, however vLLM packed them."""
    if logprobs is None:
        return None
    return [{k: v.logprob for k, v in (entry or {}).items()} for entry in logprobs]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in expected:
        assert found[name][0] == expected[name][0], name
        for ours, theirs in zip(
            [*found[name][1], *found[name][2]],
            [*expected[name][1], *expected[name][2]],
            strict=True,
        ):
            assert (ours is None) == (theirs is None), name
            for a, b in zip(ours or [], theirs or [], strict=True):
                # The last ranks may swap where two tokens are equally likely.
                for token in a.keys() & b.keys():
                    assert math.isclose(a[token], b[token], abs_tol=1e-4), (name, token)
                assert len(a) == len(b)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    with engine(logprobs_mode="raw_logprobs") as llm:
        found: dict[str, Any] = {}
        for names in BATCHES:
            found |= run(llm, names)
        return found


def test_parameters_in_mixed_batches(reference: dict[str, Any]) -> None:
    """Full trees for every one of them, one entry of logprobs per emitted token."""
    with engine(mtp_tree(3, 4, 7), logprobs_mode="raw_logprobs") as llm:
        for names in BATCHES:
            assert_same(run(llm, names), {n: reference[n] for n in names})
        assert not runner_of(llm).tree.chain_only.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PARAMS))
def test_parameter_alone(name: str, reference: dict[str, Any]) -> None:
    with engine(mtp_tree(3, 4, 7), logprobs_mode="raw_logprobs") as llm:
        assert_same(run(llm, [name]), {name: reference[name]})
