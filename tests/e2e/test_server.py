"""The OpenAI-compatible server with the option, driven by the openai client."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import CPU_SETTINGS, MODEL, engine, generate
from tests.helpers.prompts import held_out

TOKENS = 24


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on the tiny model; its log is printed on failure."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log.txt"
    # `vllm serve` looks for a distribution named vllm, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(MODEL), "--served-model-name", "tiny"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--attention-backend", "CPU_MLA", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--speculative-config", json.dumps(mtp_tree(3, 4, 7))]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        try:
            wait_until_healthy(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def wait_until_healthy(port: int, process: Any, log: Path) -> None:
    for _ in range(300):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def client(server: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server}/v1", api_key="none", timeout=300, max_retries=0)


def complete(server: str, prompt: list[int], **settings: Any) -> Any:
    settings = {"max_tokens": TOKENS, "temperature": 0, **settings}
    extra = {"ignore_eos": True, "return_token_ids": True}
    return client(server).completions.create(
        model="tiny", prompt=prompt, extra_body=extra, **settings
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    from vllm import SamplingParams

    with engine(**CPU_SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        return generate(llm, held_out(4), params)


def test_several_clients_at_once(server: str, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: complete(server, p), held_out(4)))
    assert [a.choices[0].token_ids for a in answers] == expected
    assert all(a.choices[0].finish_reason == "length" for a in answers)


def test_streaming(server: str, expected: list[list[int]]) -> None:
    whole = complete(server, held_out(1)[0]).choices[0].text
    ids, text = [], ""
    for chunk in complete(server, held_out(1)[0], stream=True):
        ids += chunk.choices[0].token_ids or []
        text += chunk.choices[0].text
    assert ids == expected[0]
    assert text == whole


def test_a_client_that_leaves_does_not_disturb(
    server: str, expected: list[list[int]]
) -> None:
    for cut in (1, 3, 6):
        stream = complete(server, held_out(2)[1], stream=True, max_tokens=200)
        for _, _ in zip(range(cut), stream, strict=False):
            pass
        stream.close()
    assert complete(server, held_out(1)[0]).choices[0].token_ids == expected[0]


def test_min_p_and_logit_bias_are_served(server: str) -> None:
    """vLLM refuses both with its own speculation; trees honour them."""
    banned = complete(server, held_out(1)[0]).choices[0].token_ids[0]
    answer = complete(server, held_out(1)[0], logit_bias={str(banned): -100})
    assert banned not in answer.choices[0].token_ids


def test_metrics_are_exposed(server: str) -> None:
    complete(server, held_out(1)[0])
    page = urllib.request.urlopen(f"{server}/metrics").read().decode()
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith("vllm:spec_decode") and "_per_pos" not in line
    }
    drafts = values["vllm:spec_decode_num_drafts_total"]
    assert drafts > 0
    assert values["vllm:spec_decode_num_draft_tokens_total"] == 7 * drafts
    assert 0 < values["vllm:spec_decode_num_accepted_tokens_total"] <= 3 * drafts
