"""The examples run as a user runs them; those that need a server share one."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server import Server, free_port, running

ROOT = Path(__file__).parents[2]
FIXED = '{"method": "mtp_tree", "shape": "fixed"}'


def test_offline_generate_prints_one_json_object() -> None:
    command = [sys.executable, "examples/offline_generate.py", "--json"]
    command += ["--num-prompts", "2", "--max-tokens", "24"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["identical"] is True
    assert report["speculative_config"] == json.loads(FIXED)
    assert 1 < report["accept_length"] <= 4
    assert report["steps"] < report["steps_without"] == report["tokens"]
    assert report["accepted_per_depth"]


def run(*words: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def accept_length(printed: str) -> float:
    (found,) = re.findall(r"mean accept length.*: ([\d.]+)", printed)
    return float(found)


def test_batch_with_seeds() -> None:
    printed = run("examples/batch_seeds.py", "--max-tokens", "16", "--num-prompts", "3")
    assert "the same in another order: 3 of 3" in printed
    assert 1 < accept_length(printed) <= 4
    assert len(set(re.findall(r"-> (.*)", printed))) == 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``examples/serve.sh``, with one size of trees, whatever steps take here."""
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log.txt"
    env = {"PORT": str(port), "PYTHON": sys.executable, "SETTINGS": FIXED}
    with running(["examples/serve.sh"], port, log, cwd=ROOT, **env) as started:
        yield started


def test_client(server: Server) -> None:
    words = "--url", server.url, "--max-tokens", "24"
    printed = run("examples/client.py", *words)
    (chunks,) = re.findall(r"(\d+) chunks for up to 24 tokens", printed)
    # A step emits several tokens, in one chunk.
    assert 6 <= int(chunks) < 24
    assert 1 < accept_length(printed) <= 4


def test_chat_with_logprobs(server: Server) -> None:
    words = "--url", server.url, "--max-tokens", "6"
    printed = run("examples/chat_logprobs.py", *words)
    rows = [line for line in printed.splitlines() if line.count("│") == 4]
    assert len(rows) == 6
    for row in rows:
        assert len(re.findall(r"\d%", row)) >= 3
    assert run("examples/chat_logprobs.py", *words) == printed


def test_bench(server: Server, tmp_path: Path) -> None:
    words = "--concurrency", "1,2", "--requests", "2", "--max-tokens", "8", "--json"
    record = json.loads(run("-m", "vllm_mtp.cli.main", "bench", server.url, *words))
    assert record["model"] == "tiny"
    for row in record["rows"]:
        assert row["failed"] == 0
        assert row["output_tokens"] == 2 * 8
        assert 1 < row["accept_length"] <= 4
        assert row["nodes_per_step"] == 7
        assert row["passes_by_nodes"].keys() == {"7"}
        assert row["ttft_ms"]["p50"] > 0 < row["tpot_ms"]["p50"]
