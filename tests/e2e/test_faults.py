"""A server under faults: each gets its error, and other requests are untouched.

The trace of this server goes to a full disk from the start. The last test ends it.
"""

import json
import os
import random
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree
from tests.helpers.prompts import held_out
from tests.helpers.server import Server, serving

ROUNDS = 60 if GPUS or "VLLM_MTP_FULL_TESTS" in os.environ else 6
"""Rounds of streams that are cut."""

FULL_DISK = "/dev/full"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    speculative = {**mtp_tree(3, 4, 7), "trace": FULL_DISK}
    with serving(speculative, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def probes(server: Server) -> list[list[int]]:
    """Prompts whose ids do not depend on the batch they are in.

    In bfloat16 those are the ones without near ties, of all the held-out prompts.
    """
    if not GPUS:
        return held_out(4)

    def smallest_gap(prompt: list[int]) -> float:
        tops = server.complete(prompt, logprobs=2).choices[0].logprobs.top_logprobs
        gaps = []
        for top in tops:
            values = sorted(top.values())
            gaps.append(values[-1] - values[-2] if len(values) > 1 else 0.0)
        return min(gaps)

    return sorted(held_out(48), key=smallest_gap)[-4:]


@pytest.fixture(scope="module")
def expected(server: Server, probes: list[list[int]]) -> list[list[int]]:
    """Ids of the probes, each alone on the server."""
    return [ids_of(server.complete(p)) for p in probes]


def ids_of(answer: Any) -> list[int]:
    return list(answer.choices[0].token_ids)


BAD: dict[str, dict[str, Any]] = {
    "temperature nan": {"temperature": float("nan")},
    "temperature infinite": {"temperature": float("inf")},
    "temperature negative": {"temperature": -1},
    "top_p nan": {"top_p": float("nan")},
    "min_p nan": {"min_p": float("nan")},
    "penalty nan": {"presence_penalty": float("nan")},
    "repetition nan": {"repetition_penalty": float("nan")},
    "logprobs huge": {"logprobs": 10**6},
    "prompt_logprobs huge": {"prompt_logprobs": 10**6},
    "prompt empty": {"prompt": []},
    "token too large": {"prompt": [5, 10**6]},
    "token beyond int64": {"prompt": [5, 2**70]},
    "token negative": {"prompt": [5, -1]},
    "prompt too long": {"prompt": [5] * 1000},
    "max_tokens negative": {"max_tokens": -1},
    "bias outside": {"logit_bias": {"9999999": 1.0}},
    "allowed outside": {"allowed_token_ids": [9999999]},
    "seed beyond int64": {"seed": 2**70},
}


def post(server: Server, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_bad_requests_are_refused_beside_good_ones(
    server: Server, probes: list[list[int]], expected: list[list[int]]
) -> None:
    """Each gets a 4xx with words, never a 5xx or an answer."""
    good = {"model": "tiny", "prompt": held_out(1)[0], "max_tokens": 4}
    bodies = {name: json.dumps(good | bad).encode() for name, bad in BAD.items()}
    bodies["no JSON"] = b"{"
    bodies["pickle"] = b"\x80\x04\x95\x0b\x00\x00\x00"
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(server.complete, p) for p in probes]
        answers = {name: post(server, body) for name, body in bodies.items()}
    assert [ids_of(p.result()) for p in beside] == expected
    for name, (status, text) in answers.items():
        assert 400 <= status < 500, f"{name}: {status} {text}"
        assert "message" in text or "detail" in text, f"{name}: {text}"


def test_a_client_that_stops_reading(
    server: Server, probes: list[list[int]], expected: list[list[int]]
) -> None:
    """Its stream fills its own buffers and nobody else's; its KV comes back."""
    body = {"model": "tiny", "prompt": held_out(1)[0], "max_tokens": 400}
    text = json.dumps(body | {"stream": True, "ignore_eos": True, "logprobs": 5})
    host, port = server.url.removeprefix("http://").split(":")
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    stuck.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    stuck.sendall((head + text).encode())
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ids_of, pool.map(server.complete, probes))) == (expected)
    stuck.close()
    wait_until_idle(server)


def wait_until_idle(server: Server) -> None:
    """Until no request runs; then all KV must be free."""
    for _ in range(120):
        values = server.metrics()
        if values["vllm:num_requests_running"] == 0:
            assert values["vllm:kv_cache_usage_perc"] == 0
            return
        time.sleep(0.5)
    pytest.fail("requests still run")


def accepted_by(server: Server, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Ids of a clean request, and its drafts and accepted tokens."""
    names = ("vllm:spec_decode_num_drafts_total",)
    names += ("vllm:spec_decode_num_accepted_tokens_total",)
    before = server.metrics()
    ids = ids_of(server.complete(prompt))
    time.sleep(0.5)
    after = server.metrics()
    return ids, [after[n] - before[n] for n in names]


def test_streams_cut_at_any_moment(
    server: Server, probes: list[list[int]], expected: list[list[int]]
) -> None:
    """After each round the rest equals itself, and drafting works as at the start."""
    rng = random.Random(0)
    clean = accepted_by(server, probes[0])

    def stream(job: tuple[list[int], int]) -> list[int]:
        prompt, cut = job
        found: list[int] = []
        answer = server.complete(prompt, stream=True)
        for chunk in answer:
            found += chunk.choices[0].token_ids or []
            if len(found) >= cut:
                answer.close()
                break
        return found

    for _ in range(ROUNDS):
        cuts = [1000] * 4
        for victim in rng.sample(range(4), rng.choice((1, 2))):
            cuts[victim] = rng.choice((1, rng.randrange(2, 20), 23))
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(stream, zip(probes, cuts, strict=True)))
        for ids, whole in zip(found, expected, strict=True):
            assert ids == whole[: len(ids)]
    wait_until_idle(server)
    assert accepted_by(server, probes[0]) == clean
    assert clean[1][1] > 0


def test_a_trace_that_cannot_be_written_stops_alone(
    server: Server, probes: list[list[int]], expected: list[list[int]]
) -> None:
    assert ids_of(server.complete(probes[0])) == expected[0]
    log = server.log.read_text()
    assert log.count("engine goes on without it") == 1, log[-2000:]


def test_a_killed_worker_ends_the_server(server: Server) -> None:
    """In mid-step: open streams end with an error, the process ends and says why."""
    processes = server.processes()
    workers = [p for p, line in processes.items() if "Worker" in line]
    workers += [p for p, line in processes.items() if "EngineCore" in line]
    assert workers, processes

    def stream() -> str:
        try:
            for n, _ in enumerate(
                server.complete(held_out(1)[0], stream=True, max_tokens=400)
            ):
                if n == 2:
                    os.kill(workers[0], signal.SIGKILL)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ended as if nothing had happened"

    start = time.monotonic()
    told = stream()
    assert "ended as" not in told
    server.process.wait(120)
    assert time.monotonic() - start < 120
    log = server.log.read_text()
    assert "EngineDeadError" in log or "died unexpectedly" in log, log[-3000:]
    assert not server.processes()
