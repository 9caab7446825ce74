"""Requests that end inside an accepted run: same ids, logprobs, text and reason."""

from typing import Any

import pytest

from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine
from tests.helpers.prompts import held_out

MAX_MODEL_LEN = 96


def cases(
    reference: list[int], pieces: list[str]
) -> dict[str, tuple[dict[str, Any], int]]:
    """Name -> (sampling parameters, prompt length).

    ``reference`` is the free text's ids, ``pieces`` the text of each.
    """
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for offset in range(5, 10):
        stop = {"stop_token_ids": [reference[offset]], "max_tokens": 12}
        found[f"stop-{offset}"] = (stop, 33)
        found[f"cap-{offset}"] = ({"max_tokens": offset, "ignore_eos": True}, 33)
        text = {"stop": ["".join(pieces[offset - 1 : offset + 1])], "logprobs": 2}
        found[f"string-{offset}"] = ({**text, "max_tokens": 40}, 33)
        text["include_stop_str_in_output"] = True
        found[f"included-{offset}"] = ({**text, "max_tokens": 40}, 33)
    found["n"] = ({"n": 3, "temperature": 0.8, "seed": 5, "max_tokens": 10}, 9)
    found["stop-string"] = ({"stop": ["self"], "max_tokens": 40}, 33)
    found["min-tokens"] = (
        {"stop_token_ids": [reference[2]], "min_tokens": 8, "max_tokens": 14},
        33,
    )
    for short in range(1, 6):
        # The context ends inside a tree.
        params = {"max_tokens": 50, "ignore_eos": True}
        found[f"context-{short}"] = (params, MAX_MODEL_LEN - 20 - short)
    return found


def outcomes(llm: Any, wanted: dict[str, tuple[dict[str, Any], int]]) -> dict[str, Any]:
    from vllm import SamplingParams

    prompt = max(held_out(48), key=len)
    inputs, params = [], []
    for settings, length in wanted.values():
        inputs.append({"prompt_token_ids": prompt[:length]})
        params.append(SamplingParams(**{"temperature": 0.0, **settings}))
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return {
        name: [
            (
                list(c.token_ids),
                c.text,
                c.finish_reason,
                c.stop_reason,
                c.logprobs is not None and len(c.logprobs) == len(c.token_ids),
            )
            for c in output.outputs
        ]
        for name, output in zip(wanted, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Any], dict[str, Any]]:
    with engine(max_model_len=MAX_MODEL_LEN) as llm:
        free = {"free": ({"max_tokens": 12, "ignore_eos": True}, 33)}
        ids = outcomes(llm, free)["free"][0][0]
        wanted = cases(ids, [llm.get_tokenizer().decode([i]) for i in ids])
        return wanted, outcomes(llm, wanted)


@pytest.mark.parametrize("shape", [(3, 4, 7), (3, 1, 3)], ids=["tree", "chain"])
def test_endings_equal_no_speculation(
    shape: tuple[int, int, int], reference: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    wanted, expected = reference
    with engine(mtp_tree(*shape), max_model_len=MAX_MODEL_LEN) as llm:
        found = outcomes(llm, wanted)
    for name in wanted:
        assert found[name] == expected[name], name
