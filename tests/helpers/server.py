"""The OpenAI-compatible server on the tiny model, as its own process."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.helpers.engine import MODEL

CPU_FLAGS = (
    *("--dtype", "float32", "--attention-backend", "CPU_MLA"),
    *("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
)
GPU_FLAGS = (
    *("--dtype", "bfloat16", "--gpu-memory-utilization", "0.2"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)


@dataclass
class Server:
    """A running server."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0
        )

    def complete(self, prompt: list[int], **settings: Any) -> Any:
        """A greedy completion whose answer carries token ids; ``settings`` override."""
        extra = {"ignore_eos": True, "return_token_ids": True}
        return self.client().completions.create(
            **{
                "model": "tiny",
                "prompt": prompt,
                "temperature": 0,
                "max_tokens": 24,
                "extra_body": extra,
                **settings,
            }
        )

    def metrics(self) -> dict[str, float]:
        """Values by name, without labels; of a name with several, the last."""
        page = urllib.request.urlopen(f"{self.url}/metrics").read().decode()
        return {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith("vllm:") and "_per_pos" not in line
        }

    def processes(self) -> dict[int, str]:
        """The server's child processes at any depth: pid -> command line."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    parents[int(entry.name)] = int(stat[1])
        found: dict[int, str] = {}
        for pid in parents:
            above = pid
            while above in parents and above != self.process.pid:
                above = parents[above]
            if above == self.process.pid and pid != above:
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    found[pid] = line.replace(b"\0", b" ").decode().strip()
        return found


@contextlib.contextmanager
def serving(speculative: Any, folder: Path, *flags: str) -> Iterator[Server]:
    """A server on the tiny model; its log is printed if it does not start."""
    port, log = free_port(), folder / "log.txt"
    # `vllm serve` looks for a distribution named vllm, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(MODEL), "--served-model-name", "tiny"]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8"]
    command += GPU_FLAGS if GPUS else CPU_FLAGS
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    with running([*command, *flags], port, log) as server:
        yield server


@contextlib.contextmanager
def running(
    command: list[str], port: int, log: Path, cwd: Path | None = None, **env: str
) -> Iterator[Server]:
    """The server that a command starts on ``port``, until it is no longer needed."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **env}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=out, env=env)
        try:
            server = Server(f"http://127.0.0.1:{port}", process, log)
            wait_until_healthy(server)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: Server) -> None:
    """Wait for the first answer; fails with the log."""
    for _ in range(300):
        if server.process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=2)
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"the server did not start:\n{server.log.read_text()[-4000:]}")
