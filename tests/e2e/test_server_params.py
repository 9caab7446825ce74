"""Requests through the OpenAI server: obeyed in full, or refused with the reason."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine, generate
from tests.helpers.prompts import held_out
from tests.helpers.server import Server, serving

PLUGIN = Path(__file__).parents[1] / "helpers" / "thinking.py"
TOKENS = 24

CALLS = [
    ("look", {"place": "here", "count": 2}),
    ("go", {"place": "there, then back"}),
]
SAID = (
    "First I look around."
    + "~"
    + "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in CALLS
    )
)
"""Thinking up to the marker, then two calls: one run may end one and begin another."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "maxLength": 8},
                    "count": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["place", "count"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "go")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    grammars = {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
        "enable_in_reasoning": True,
    }
    flags = ["--chat-template", str(template)]
    flags += ["--structured-outputs-config", json.dumps(grammars)]
    flags += ["--reasoning-parser-plugin", str(PLUGIN), "--reasoning-parser", "marked"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serving(mtp_tree(3, 4, 7), folder, *flags) as running:
        yield running


def chat(server: Server, **settings: Any) -> Any:
    messages = [{"role": "user", "content": "def test_"}]
    settings = {"temperature": 0, "max_tokens": 200, **settings}
    return server.client().chat.completions.create(
        model="tiny", messages=messages, **settings
    )


# --- obeyed ---------------------------------------------------------------------------

OBEYED: dict[str, dict[str, Any]] = {
    "logit_bias bans": {"temperature": 0.0, "logit_bias": {"53": -100, "15": -100}},
    "logit_bias forces": {"temperature": 0.0, "logit_bias": {"277": 100}},
    "min_p": {"temperature": 1.0, "seed": 5, "min_p": 0.9},
    "bad_words": {"temperature": 0.0, "bad_words": ["self.assert", "self"]},
    "allowed_token_ids": {"temperature": 0.7, "seed": 6, "allowed_token_ids": [9, 15]},
    "stop": {"temperature": 0.0, "stop": ["(", ":\n"], "logprobs": 2},
    "regex": {"temperature": 0.8, "seed": 7, "structured_outputs": {"regex": "[a-f]+"}},
}
TO_CLIENT = {"min_p", "bad_words", "allowed_token_ids", "structured_outputs"}
"""Parameters that are vLLM's, not OpenAI's."""


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    found = {}
    with engine() as llm:
        for name, settings in OBEYED.items():
            settings = dict(settings)
            if "logit_bias" in settings:
                bias = settings["logit_bias"].items()
                settings["logit_bias"] = {int(k): v for k, v in bias}
            if "structured_outputs" in settings:
                wanted = StructuredOutputsParams(**settings["structured_outputs"])
                settings["structured_outputs"] = wanted
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **settings)
            found[name] = generate(llm, [held_out(1)[0]], params)[0]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", OBEYED)
def test_every_token_obeys(
    name: str, stream: bool, expected: dict[str, list[int]], server: Server
) -> None:
    """The ids of no speculation, also where a stop string ends inside a run."""
    given = {k: v for k, v in OBEYED[name].items() if k not in TO_CLIENT}
    extra = {k: v for k, v in OBEYED[name].items() if k in TO_CLIENT}
    extra |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.complete(
        held_out(1)[0], max_tokens=TOKENS, stream=stream, extra_body=extra, **given
    )
    chunks = list(answer) if stream else [answer]
    ids = [i for c in chunks for i in c.choices[0].token_ids or []]
    assert ids == expected[name]
    if "logprobs" in given:
        scored = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        assert sum(len(s.token_logprobs) for s in scored) == len(ids)
    if not stream:
        assert answer.usage.completion_tokens == len(ids)


# --- refused --------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "min_p": ({"min_p": 1.5}, "min_p"),
    "logit_bias": ({"logit_bias": {"99999": 1}}, "vocab"),
    "allowed_token_ids": ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "regex"),
    "grammar": ({"structured_outputs": {"grammar": "root ::= other"}}, "grammar"),
    "two grammars": (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured",
    ),
    "penalty": ({"presence_penalty": 9}, "presence_penalty"),
    "logprobs": ({"logprobs": True, "top_logprobs": 999}, "logprobs"),
    "thinking_token_budget": ({"thinking_token_budget": -2}, "thinking_token_budget"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str, server: Server) -> None:
    from openai import APIStatusError

    settings, word = REFUSED[name]
    with pytest.raises(APIStatusError) as caught:
        chat(server, extra_body=settings)
    assert 400 <= caught.value.status_code < 500
    assert word in caught.value.message.lower()
    assert chat(server, max_tokens=2).choices[0].finish_reason == "length"


# --- tools and thinking ---------------------------------------------------------------


def joined(stream: Any) -> tuple[str, list[tuple[str, str]]]:
    """What a streamed answer's deltas add up to: thinking, (tool, arguments)."""
    thinking, calls = "", {}
    for chunk in stream:
        delta = chunk.choices[0].delta
        thinking += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            name += call.function.name or ""
            calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return thinking, [calls[i] for i in sorted(calls)]


def test_two_calls_survive_streaming(server: Server) -> None:
    """Catches: a delta that ends one call and begins another loses arguments."""
    extra = {"structured_outputs": {"choice": [SAID]}}
    message = chat(server, tools=TOOLS, extra_body=extra).choices[0].message
    whole = [
        (c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls
    ]
    assert whole == CALLS
    assert message.reasoning == "First I look around."
    for interval in (1, 7, 40):
        more = {**extra, "stream_interval": interval}
        thinking, calls = joined(
            chat(server, tools=TOOLS, stream=True, extra_body=more)
        )
        assert thinking == message.reasoning, interval
        assert [(n, json.loads(a)) for n, a in calls] == CALLS, interval


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "go"}}], ids=str
)
def test_a_tool_choice_is_obeyed(choice: Any, server: Server) -> None:
    message = chat(server, tools=TOOLS, tool_choice=choice).choices[0].message
    for call in message.tool_calls:
        assert call.function.name == "go" or choice == "required"
        assert set(json.loads(call.function.arguments)) == {"place", "count"}
    assert message.tool_calls
