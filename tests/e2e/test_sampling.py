"""Every sampling parameter on trees: ids and log-probabilities of no speculation."""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine, generate, runner_of
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
    "logprob_token_ids": {"temperature": 0.8, "logprob_token_ids": [5, 53, 199]},
    "only_sampled_logprob": {"temperature": 0.8, "top_k": 20, "logprobs": 0},
    "ignore_eos": {"temperature": 1.5, "ignore_eos": True},
    "stop": {"temperature": 0.0, "stop": ["):\n", "]\n"], "logprobs": 1},
    "repetition_detection": {
        "temperature": 0.0,
        "repetition_detection": {"max_pattern_size": 8, "min_count": 2},
    },
    "all_penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "top_p": 0.95,
    },
    # The end of text is the likeliest token from the start on.
    "eos_after_min_tokens": {
        "temperature": 0.0,
        "min_tokens": 10,
        "logit_bias": {1: 100.0},
    },
}
"""Named by the parameter under test; every request is seeded."""

BATCHES = [list(PARAMS)[i : i + 8] for i in range(0, len(PARAMS), 8)]


def run(
    llm: Any, names: list[str], tokens: int = TOKENS, **more: Any
) -> dict[str, Any]:
    """Generate one batch; per parameter (ids, log-probabilities, prompt's)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    prompts = held_out(48)
    inputs, params = [], []
    for name in names:
        index = list(PARAMS).index(name)
        inputs.append({"prompt_token_ids": prompts[index][:40]})
        settings = {"seed": 17 + index, "max_tokens": tokens, **PARAMS[name], **more}
        if "repetition_detection" in settings:
            detection = RepetitionDetectionParams(**settings["repetition_detection"])
            settings["repetition_detection"] = detection
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
                    close = math.isclose(a[token], b[token], abs_tol=1e-4)
                    assert close or a[token] == b[token], (name, token)
                assert len(a) == len(b)


PROCESSED = ["top_k", "all_penalties", "logit_bias", "sampled_logprobs"]


def run_processed(llm: Any) -> dict[str, Any]:
    """The same with log-probabilities after all parameters were applied."""
    sampler = runner_of(llm).sampler
    sampler.logprobs_mode = "processed_logprobs"
    try:
        return run(llm, PROCESSED, 24, logprobs=3)
    finally:
        sampler.logprobs_mode = "raw_logprobs"


def run_seeds(llm: Any, alone: bool) -> list[list[int]]:
    """Seeds 42, 43, none, 42: the same prompt, alone or among others."""
    from vllm import SamplingParams

    prompts = held_out(8, (20,))
    seeds = (42, 43, None, 42)
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=24) for s in seeds]
    batch = [prompts[0]] * 4
    if alone:
        return [generate(llm, batch[:1], p)[0] for p in params]
    others = [
        SamplingParams(temperature=1.0, seed=s, max_tokens=30) for s in (1, None, 42, 3)
    ]
    return generate(llm, [*batch, *prompts[1:5]], [*params, *others])[:4]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    with engine(logprobs_mode="raw_logprobs") as llm:
        found: dict[str, Any] = {}
        for names in BATCHES:
            found |= run(llm, names)
        found["processed"] = run_processed(llm)
        found["seeds"] = run_seeds(llm, alone=False)
        return found


@pytest.fixture(scope="module")
def trees(reference: dict[str, Any]) -> Iterator[Any]:
    """One engine for all tests here, started when the reference's is down."""
    with engine(mtp_tree(3, 4, 7), logprobs_mode="raw_logprobs") as llm:
        yield llm


def test_parameters_in_mixed_batches(trees: Any, reference: dict[str, Any]) -> None:
    """Full trees for every one of them, one entry of logprobs per emitted token."""
    for names in BATCHES:
        found = run(trees, names)
        assert_same(found, {n: reference[n] for n in names})
        for name in names:
            for ids, logprobs in zip(*found[name][:2], strict=True):
                assert logprobs is None or len(logprobs) == len(ids), name
    assert not runner_of(trees).tree.chain_only.any()


def test_parameters_do_something(reference: dict[str, Any]) -> None:
    """Each of these would pass the other tests if it were ignored."""
    first = {name: reference[name][0][0] for name in PARAMS}
    assert 199 not in first["logit_bias"]
    assert set(first["allowed_token_ids"]) <= set(range(2, 500))
    assert len(first["eos_after_min_tokens"]) == 11
    assert len(first["stop"]) < TOKENS
    assert len(first["repetition_detection"]) < TOKENS
    assert all(len(x) == 4 for x in reference["logprob_token_ids"][1][0])
    assert all(len(x) == 1 for x in reference["only_sampled_logprob"][1][0])


def test_processed_logprobs(trees: Any, reference: dict[str, Any]) -> None:
    assert_same(run_processed(trees), reference["processed"])


@pytest.mark.parametrize("alone", [True, False])
def test_a_seed_is_obeyed(alone: bool, trees: Any, reference: dict[str, Any]) -> None:
    """Whatever else is in the batch; other seeds give other text."""
    found = run_seeds(trees, alone)
    seeded = [0, 1, 3]
    assert [found[i] for i in seeded] == [reference["seeds"][i] for i in seeded]
    assert found[0] == found[3]
    assert len({tuple(ids) for ids in found}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PARAMS))
def test_parameter_alone(name: str, trees: Any, reference: dict[str, Any]) -> None:
    assert_same(run(trees, [name]), {name: reference[name]})
