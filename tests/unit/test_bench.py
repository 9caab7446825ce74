"""``vllm-mtp bench`` against a small server whose answers are known."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_mtp.bench.client import Answer, Round
from vllm_mtp.bench.report import make_row, read_counters, spread
from vllm_mtp.cli import main

TOKENS = 12


class Fake(BaseHTTPRequestHandler):
    """Streams ``TOKENS`` tokens in chunks of 3; counts 4 drafts with 2 accepted."""

    running = most = served = 0
    bodies: list[dict[str, Any]] = []  # noqa: RUF012
    fail_from: int | None = None
    lock = threading.Lock()

    def log_message(self, *words: Any) -> None:
        """Nothing on the terminal."""

    def reply(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply('{"data": [{"id": "tiny"}]}')
            return
        n = Fake.served
        labels = 'engine="0",model_name="tiny"'
        self.reply(
            "# HELP vllm:spec_decode_num_drafts_total x\n"
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {4.0 * n}\n"
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09\n"
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {8.0 * n}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}}'
            f" {4.0 * n}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}}'
            f" {4.0 * n}\n"
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {28.0 * n}\n"
            f"vllm:mtp_tree_nodes_verified_total{{{labels}}} {20.0 * n}\n"
            f'vllm:mtp_tree_passes_total{{{labels},nodes="7"}} {4.0 * n}\n'
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Fake.lock:
            Fake.bodies.append(body)
            Fake.running += 1
            Fake.most = max(Fake.most, Fake.running)
            failing = Fake.fail_from is not None and Fake.served >= Fake.fail_from
        try:
            if failing:
                self.reply("no room", 503)
                return
            events = [{"choices": [{"text": "abc"}]} for _ in range(TOKENS // 3)]
            events.append({"choices": [], "usage": {"completion_tokens": TOKENS}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self.reply("".join([*lines, "data: [DONE]\n\n"]))
        finally:
            with Fake.lock:
                Fake.running -= 1
                Fake.served += 1


@pytest.fixture
def url() -> Iterator[str]:
    Fake.running = Fake.most = Fake.served = 0
    Fake.bodies, Fake.fail_from = [], None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*words: str) -> Any:
    return CliRunner().invoke(main.app, ["bench", *words])


def test_rounds_of_a_server(url: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(f"{url}/v1/", "--concurrency", "1,3", "--json", "--output", str(file))
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record == json.loads(file.read_text())
    assert record["model"] == "tiny"
    assert record["first_error"] is None
    assert [row["requests"] for row in record["rows"]] == [4, 12]
    for row in record["rows"]:
        assert row["failed"] == 0
        assert row["output_tokens"] == TOKENS * row["requests"]
        assert row["accept_length"] == 3.0
        assert row["accepted_per_depth"] == [1.0, 1.0]
        assert row["nodes_per_step"] == 5.0
        assert row["passes_by_nodes"] == {"7": 4 * row["requests"]}
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        assert row["tpot_ms"]["mean"] >= 0
    # One warm-up, which no row counts.
    assert len(Fake.bodies) == 1 + 4 + 12
    assert len({body["prompt"] for body in Fake.bodies}) > 10
    assert {body["max_tokens"] for body in Fake.bodies} == {128}
    assert all(body["ignore_eos"] for body in Fake.bodies)
    assert Fake.most <= 3


def test_the_table(url: str) -> None:
    done = run(url, "--concurrency", "2", "--requests", "3", "--stop-at-eos")
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.stdout
    assert "3.000" in done.stdout
    # Nothing is cut off at 80 columns.
    assert "…" not in done.stdout
    assert not any("ignore_eos" in body for body in Fake.bodies)


def test_failures_are_counted_and_said(url: str) -> None:
    Fake.fail_from = 3
    done = run(url, "--concurrency", "1", "--requests", "4", "--json")
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    assert record["rows"][0]["failed"] == 2
    assert record["rows"][0]["output_tokens"] == 2 * TOKENS
    assert "HTTP 503: no room" in record["first_error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:9",), "no OpenAI-compatible server answers there"),
        (("nonsense",), "no OpenAI-compatible server answers there"),
        (("http://x", "--concurrency", "0,2"), "must be whole numbers from 1"),
        (("http://x", "--concurrency", "a"), "must be whole numbers from 1"),
        (("http://x", "--prompts", "/no/such.txt"), "not a file of prompts"),
    ],
)
def test_refusals(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.txt", "one\n\ntwo\n"), ("p.jsonl", '"one"\n{"prompt": "two", "x": 1}\n')],
)
def test_prompts_of_a_file(url: str, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    done = run(url, "--concurrency", "1", "--prompts", str(tmp_path / name))
    assert done.exit_code == 0, done.output
    assert {body["prompt"] for body in Fake.bodies} == {"one", "two"}


def test_a_server_without_speculation_has_no_accept_length() -> None:
    answers = [
        Answer(0.0, 0.1, 0.3, 11),
        Answer(0.0, error="x"),
        Answer(0.0, 0.2, 0.2, 1),
    ]
    row = make_row(Round(2, 2.0, answers), Counter(), Counter())
    assert row["accept_length"] is row["nodes_per_step"] is None
    assert row["accepted_per_depth"] == []
    assert (row["failed"], row["tokens_per_s"]) == (1, 6.0)
    assert row["ttft_ms"]["mean"] == 150.0
    # A single token has no time per token after the first.
    assert row["tpot_ms"] == {"mean": 20.0, "p50": 20.0, "p90": 20.0, "p99": 20.0}


def test_percentiles_are_values_that_occurred() -> None:
    found = spread([float(v) for v in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert spread([None]) is None


def test_counters_of_several_engines_are_added_up() -> None:
    page = "\n".join(
        f'vllm:mtp_tree_passes_total{{engine="{e}",model_name="m,nodes",nodes="7"}} 2.0'
        for e in range(2)
    )
    assert read_counters(page) == {"mtp_tree_passes/7": 4}
    assert read_counters("vllm:spec_decode_num_drafts_total 3.0") == {
        "spec_decode_num_drafts": 3
    }
