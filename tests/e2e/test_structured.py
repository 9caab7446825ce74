"""Structured output and thinking budgets: chains beside trees, the same tokens."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.prompts import held_out
from tests.helpers.scheduling import Scheduled, scheduled_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {
            "type": "array",
            "items": {"enum": ["self", "test", "assert"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{3,8}@[a-z]{2,6}\.(com|org)"
GRAMMAR = 'root ::= "assert " name " == " name\nname ::= "self." [a-z]{3,9}'
CHOICE = ["self.assertEqual(first, second)", "self.assertTrue(first)"]
ANYTHING = r"[ -~\n]{12,40}"
"""What the model would say anyway: long accepted runs under a grammar."""


def is_json(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "count", "tags"]
    assert len(value["name"]) <= 12
    assert 0 <= value["count"] <= 99
    return set(value["tags"]) <= {"self", "test", "assert"}


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json": ({"json": SCHEMA}, is_json),
    "regex": ({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "grammar": (
        {"grammar": GRAMMAR},
        re.compile(r"assert self\.[a-z]{3,9} == self\.[a-z]{3,9}").fullmatch,
    ),
    "choice": ({"choice": CHOICE}, CHOICE.__contains__),
    "anything": ({"regex": ANYTHING}, re.compile(ANYTHING).fullmatch),
}

MIXED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "json": ("json", {"temperature": 0.0}),
    "free": (None, {"temperature": 0.0}),
    "regex sampled": ("regex", {"temperature": 0.8}),
    "grammar": ("grammar", {"temperature": 0.0}),
    "free sampled": (None, {"temperature": 0.8, "frequency_penalty": 0.5}),
    "choice sampled": ("choice", {"temperature": 1.0}),
    "json sampled": (
        "json",
        {"temperature": 0.8, "presence_penalty": 0.6, "logprobs": 2},
    ),
    "anything": ("anything", {"temperature": 0.8, "bad_words": ["self", "assert"]}),
}
"""Name -> (constraint, sampling parameters): a batch of eight."""

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    # The model is fond of spaces, which JSON allows without end.
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
    "reasoning_config": {
        "reasoning_start_str": "<|begin_of_text|>",
        "reasoning_end_str": "# done\n",
    },
}


def params_for(constraint: str | None, **settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"max_tokens": 64, **settings}
    if constraint is None:
        return SamplingParams(ignore_eos=True, **settings)
    wanted = StructuredOutputsParams(**CONSTRAINTS[constraint][0])
    return SamplingParams(structured_outputs=wanted, **settings)


def run_mixed(llm: Any) -> dict[str, Any]:
    """Per name (ids, text, finish reason, entries of logprobs)."""
    inputs = [{"prompt_token_ids": p} for p in held_out(8, (9, 20, 33))]
    params = [
        params_for(constraint, seed=40 + i, **settings)
        for i, (constraint, settings) in enumerate(MIXED.values())
    ]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return {
        name: (
            list(a.token_ids),
            a.text,
            a.finish_reason,
            None if a.logprobs is None else len(a.logprobs),
        )
        for name, a in zip(MIXED, answers, strict=True)
    }


def set_reasoner(llm: Any, end: str | None) -> None:
    """Take thinking to end at the token ``end``, or at once if there is none."""
    from tests.helpers.thinking import MarkedReasoningParser

    core = llm.llm_engine.engine_core.engine_core
    manager = core.structured_output_manager
    manager.reasoner_cls = None if end is None else MarkedReasoningParser
    MarkedReasoningParser.end = end or ""


class Accepted:
    """Accepted drafts per request of the batches run since."""

    def __init__(self, llm: Any) -> None:
        self.counts: Counter[str] = Counter()
        runner_of(llm).rejection_sampler.observer = self

    def __call__(self, batch: Any, fed: Any, drawn: Any, num_sampled: Any) -> None:
        for name, count in zip(batch.req_ids, num_sampled.tolist(), strict=True):
            self.counts[name.partition("-")[0]] += max(count - 1, 0)

    def in_order(self) -> list[int]:
        return [self.counts[name] for name in sorted(self.counts, key=int)]


# --- without speculation --------------------------------------------------------------


def find_marker(llm: Any) -> tuple[list[int], int]:
    """Greedy text with a token that it says once, not among the first ten."""
    for prompt in held_out(8, (33,)):
        ids = generate(llm, [prompt], params_for(None, temperature=0.0))[0]
        counts = Counter(prompt + ids)
        for place, token in enumerate(ids[:48]):
            if place >= 10 and counts[token] == 1:
                return prompt + ids[: place + 1], token
    raise AssertionError("no text has a marker")


def thinking_cases(marked: list[int]) -> tuple[list[list[int]], list[Any]]:
    """Eight requests whose thinking ends 1 to 8 tokens after the prompt."""
    prompts = [marked[:-offset] for offset in range(1, 9)]
    kinds = ["json", "anything", "regex", "json"] * 2
    return prompts, [params_for(kind, temperature=0.0) for kind in kinds]


def budget_cases() -> tuple[list[list[int]], list[Any]]:
    """Budgets that end 0 to 12 tokens after the prompt, among free requests."""
    prompts = held_out(8, (9, 16, 20))
    left = (0, 1, 2, 3, None, 7, 12, None)
    params = [
        params_for(
            None,
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=40,
            thinking_token_budget=None if n is None else len(prompts[i]) - 1 + n,
        )
        for i, n in enumerate(left)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    with engine(**SETTINGS) as llm:
        found: dict[str, Any] = {"mixed": run_mixed(llm)}
        marked, marker = find_marker(llm)
        end = llm.get_tokenizer().convert_ids_to_tokens(marker)
        set_reasoner(llm, end)
        found["marked"], found["end"] = marked, end
        found["thinking"] = generate(llm, *thinking_cases(marked))
        set_reasoner(llm, None)
        found["budgets"] = generate(llm, *budget_cases())
        return found


@pytest.fixture(scope="module")
def scheduled(reference: dict[str, Any]) -> Iterator[Scheduled]:
    """With async scheduling, so that drafts are validated while a step is in flight."""
    with scheduled_engine(mtp_tree(3, 4, 7), **SETTINGS) as s:
        yield s


@pytest.fixture
def trees(scheduled: Scheduled) -> Any:
    return scheduled.llm


# --- with trees -----------------------------------------------------------------------


def test_mixed_batch(trees: Any, reference: dict[str, Any]) -> None:
    """Six grammars and two free requests: valid, and the ids of no speculation."""
    accepted = Accepted(trees)
    found = run_mixed(trees)
    assert found == reference["mixed"]
    for name, (constraint, _) in MIXED.items():
        ids, text, reason, num_logprobs = found[name]
        if constraint is not None:
            assert reason == "stop", (name, text)
            assert CONSTRAINTS[constraint][1](text), (name, text)
        if num_logprobs is not None:
            assert num_logprobs == len(ids)
    constrained = [constraint is not None for constraint, _ in MIXED.values()]
    assert int(runner_of(trees).tree.chain_only.sum()) == sum(constrained)
    accepted_drafts = accepted.in_order()
    assert sum(a for a, c in zip(accepted_drafts, constrained, strict=True) if c) > 0
    assert all(a for a, c in zip(accepted_drafts, constrained, strict=True) if not c)


def test_thinking_ends_inside_an_accepted_run(
    trees: Any, reference: dict[str, Any]
) -> None:
    """The grammar binds behind the marker, at whatever depth the marker is drafted.

    Catches: tokens before the marker fed to the grammar, drafts behind it unmasked.
    """
    marked = reference["marked"]
    set_reasoner(trees, reference["end"])
    accepted = Accepted(trees)
    prompts, params = thinking_cases(marked)
    ids = generate(trees, prompts, params)
    set_reasoner(trees, None)
    assert ids == reference["thinking"]
    kinds = ["json", "anything", "regex", "json"] * 2
    for offset, (tokens, kind) in enumerate(zip(ids, kinds, strict=True), 1):
        assert tokens[:offset] == marked[-offset:]
        said = trees.get_tokenizer().decode(tokens[offset:], skip_special_tokens=True)
        assert CONSTRAINTS[kind][1](said), said
    assert all(accepted.in_order()[2:])


def test_thinking_budgets(trees: Any, reference: dict[str, Any]) -> None:
    """Thinking is cut at the budget to the token, whatever was accepted."""
    prompts, params = budget_cases()
    ids = generate(trees, prompts, params)
    assert ids == reference["budgets"]
    end = trees.get_tokenizer().encode("# done\n", add_special_tokens=False)
    budgets = [p.thinking_token_budget for p in params]
    assert int(runner_of(trees).tree.chain_only.sum()) == 8 - budgets.count(None)
    for prompt, tokens, budget in zip(prompts, ids, budgets, strict=True):
        if budget is not None:
            thought = budget - (len(prompt) - 1)
            assert tokens[thought : thought + len(end)] == end


def test_preempted_requests(scheduled: Scheduled, reference: dict[str, Any]) -> None:
    """A pool for about two of the eight: drafts of another state are never used.

    Catches: drafts kept over a preemption, which the grammar would refuse, and noise
    that depends on when a request runs.
    """
    before = scheduled.preemptions
    with scheduled.free_blocks(10):
        found = run_mixed(scheduled.llm)
    assert found == reference["mixed"]
    assert scheduled.preemptions > before, "nothing was preempted"
    scheduled.assert_nothing_leaked()
