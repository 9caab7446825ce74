"""The OpenAI-compatible server with the option, driven by the openai client."""

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import CPU_SETTINGS, engine
from tests.helpers.prompts import held_out
from tests.helpers.server import Server, serving

TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(mtp_tree(3, 4, 7), folder) as running:
        yield running


def complete(server: Server, prompt: list[int], **settings: Any) -> Any:
    return server.complete(prompt, **{"max_tokens": TOKENS, **settings})


@dataclass
class Expected:
    """Prompts, and their ids without speculation."""

    prompts: list[list[int]]
    ids: list[list[int]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """In bfloat16 those of many prompts whose best two tokens are furthest apart."""
    from vllm import SamplingParams

    prompts = held_out(48 if GPUS else 4)
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2
    )
    settings = {"dtype": "bfloat16", "attention_backend": None} if GPUS else {}
    with engine(**{**CPU_SETTINGS, **settings}) as llm:
        inputs = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    found = [o.outputs[0] for o in outputs]

    def smallest_gap(index: int) -> float:
        tops = [sorted(v.logprob for v in s.values()) for s in found[index].logprobs]
        return min(top[-1] - top[-2] for top in tops)

    order = range(len(prompts))
    if GPUS:
        order = sorted(order, key=smallest_gap)[-4:]
    return Expected(
        [prompts[i] for i in order], [list(found[i].token_ids) for i in order]
    )


def test_several_clients_at_once(server: Server, expected: Expected) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: complete(server, p), expected.prompts))
    assert [a.choices[0].token_ids for a in answers] == expected.ids
    assert all(a.choices[0].finish_reason == "length" for a in answers)


def test_streaming(server: Server, expected: Expected) -> None:
    prompt = expected.prompts[0]
    whole = complete(server, prompt).choices[0].text
    ids, text = [], ""
    for chunk in complete(server, prompt, stream=True):
        ids += chunk.choices[0].token_ids or []
        text += chunk.choices[0].text
    assert ids == expected.ids[0]
    assert text == whole


def test_a_client_that_leaves_does_not_disturb(
    server: Server, expected: Expected
) -> None:
    for cut in (1, 3, 6):
        stream = complete(server, held_out(2)[1], stream=True, max_tokens=200)
        for _, _ in zip(range(cut), stream, strict=False):
            pass
        stream.close()
    answer = complete(server, expected.prompts[0])
    assert answer.choices[0].token_ids == expected.ids[0]


def test_min_p_and_logit_bias_are_served(server: Server) -> None:
    """vLLM refuses both with its own speculation; trees honour them."""
    banned = complete(server, held_out(1)[0]).choices[0].token_ids[0]
    answer = complete(server, held_out(1)[0], logit_bias={str(banned): -100})
    assert banned not in answer.choices[0].token_ids


def test_metrics_are_exposed(server: Server) -> None:
    complete(server, held_out(1)[0])
    page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    values = {}
    for line in page.splitlines():
        if line.startswith(("vllm:spec_decode", "vllm:mtp_tree")):
            name, labels = line.split("{")
            own = re.findall(r'(?:reason|nodes|position)="(\w+)"', labels)
            values["/".join([name, *own])] = float(line.rsplit(" ", 1)[1])
    drafts = values["vllm:spec_decode_num_drafts_total"]
    assert drafts > 0
    assert values["vllm:spec_decode_num_draft_tokens_total"] == 7 * drafts
    assert 0 < values["vllm:spec_decode_num_accepted_tokens_total"] <= 3 * drafts
    assert values["vllm:mtp_tree_nodes_verified_total"] == 7 * drafts
    prefills = values["vllm:mtp_tree_steps_without_drafts_total/prefill"]
    assert prefills >= 1
    drafted = values["vllm:mtp_tree_nodes_drafted_total"]
    assert drafted == 36 * (drafts + prefills)
    assert values["vllm:mtp_tree_passes_total/7"] > 0
    assert not any("phase" in name for name in values)
