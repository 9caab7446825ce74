"""A server under mixed traffic for long: the same answers, speed and memory at the end.

    python -m benchmarks.soak --minutes 25 --out benchmarks/results/soak_h200.json

More requests than the KV pool holds come at once, so that requests are preempted and
each block is used again and again; some are aborted. Every half minute the traffic
pauses, and a probe prompt is served alone: its ids and accepted tokens must be those of
the first time. Pauses keep to the clock, so that any five minutes hold the same
requests. Speed is measured between pauses. The file is written at every probe.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.common import write_record
from tests.helpers.prompts import held_out
from tests.helpers.server import Server, serving

CYCLE = 10
"""Segments after which the same requests come again: five minutes of them."""

PAUSE = 0.2
"""Share of a segment in which the traffic drains and the probe is served."""

ON_GPU = torch.cuda.is_available()
BLOCK_SIZE = 64 if ON_GPU else 16
PROBE = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--minutes", type=float, default=25)
    add("--probe-every", type=float, default=30, help="seconds")
    add("--concurrency", type=int, default=32 if ON_GPU else 6)
    add("--pool-tokens", type=int, default=4096 if ON_GPU else 640, help="KV pool")
    add("--abort", type=float, default=0.15, help="share of requests cut in mid-stream")
    add("--shape", default="3,4,7", help="num_steps,topk,num_speculative_tokens")
    return parser.parse_args()


class Traffic:
    """Streams that are started again as they end, while the gate is open."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.server, self.args = server, args
        self.texts = [p for p in held_out(48) if len(p) > 12]
        self.finished = self.aborted = self.failed = 0
        self.open = False

    async def run(self, session: aiohttp.ClientSession, seed: int) -> None:
        """Serve the requests of ``seed`` until the gate closes, then drain."""
        self.open = True
        rng = random.Random(seed)
        await asyncio.gather(
            *(self._worker(session, rng) for _ in range(self.args.concurrency))
        )

    async def _worker(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while self.open:
            body, cut = self._request(rng)
            try:
                await self._stream(session, body, cut)
            except aiohttp.ClientError as error:
                self.failed += 1
                print(f"request failed: {error}", flush=True)
                await asyncio.sleep(1)

    async def _stream(
        self, session: aiohttp.ClientSession, body: dict[str, Any], cut: int
    ) -> None:
        url = f"{self.server.url}/v1/completions"
        async with session.post(url, json=body) as answer:
            answer.raise_for_status()
            events = 0
            async for line in answer.content:
                events += line.startswith(b"data: ")
                if events >= cut:
                    self.aborted += 1
                    return
        self.finished += 1

    def _request(self, rng: random.Random) -> tuple[dict[str, Any], int]:
        """A completion request, and the number of events after which it is cut."""
        most = 160 if ON_GPU else 40
        length = rng.choice((1, rng.randint(2, 40), rng.randint(2, most)))
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": (3 * rng.choice(self.texts))[:length],
            "max_tokens": rng.randint(8, most),
            "temperature": rng.choice((0, 0, 0.8, 1.0)),
            "seed": rng.randrange(1 << 31),
            "ignore_eos": True,
            "stream": True,
        }
        if rng.random() < 0.2:
            body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
        if rng.random() < 0.2:
            body |= {"logprobs": 3}
        cut = rng.randint(1, 20) if rng.random() < self.args.abort else 1 << 30
        return body, cut


class Soak:
    """The loop of traffic and probes, and what it found."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.server, self.args = server, args
        self.traffic = Traffic(server, args)
        self.begin = time.monotonic()
        self.segments: list[dict[str, float]] = []
        self.first_probe: tuple[list[int], float] | None = None
        self.probes = self.mismatches = 0
        self.host_mib: list[float] = []
        self.device_mib: list[float] = []

    @property
    def minutes(self) -> float:
        """Minutes since the start."""
        return (time.monotonic() - self.begin) / 60

    async def run(self) -> None:
        """Until the minutes are over; the record is written after every segment."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await self._probe(session)
            self.begin = time.monotonic()
            while self.minutes < self.args.minutes - 0.01:
                await self._segment(session, len(self.segments))
                await self._probe(session)
                self.write()
                every = self.args.probe_every
                now = time.monotonic() - self.begin
                await asyncio.sleep(max(len(self.segments) * every - now, 0))

    async def _segment(self, session: aiohttp.ClientSession, index: int) -> None:
        start, minute = time.monotonic(), self.minutes
        tokens = self._counter("generation_tokens_total")
        preempted = self._counter("num_preemptions_total")
        running = asyncio.create_task(self.traffic.run(session, index % CYCLE))
        end = self.begin + (index + 1 - PAUSE) * self.args.probe_every
        await asyncio.sleep(max(end - start, 1))
        self.traffic.open = False
        # Before the drain, in which fewer and fewer requests run.
        tokens = await asyncio.to_thread(self._counter, "generation_tokens_total") - (
            tokens
        )
        seconds = time.monotonic() - start
        await running
        preempted = self._counter("num_preemptions_total") - preempted
        self.segments.append(
            {"minute": minute, "tok_s": tokens / seconds, "preempted": preempted}
        )
        self.host_mib.append(round(resident_mib(self.server), 1))
        self.device_mib.append(device_used_mib(self.server))

    async def _probe(self, session: aiohttp.ClientSession) -> None:
        """Serve the probe alone, without prefix hits; count if it differs."""
        names = (
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_drafts_total",
        )
        await self._until_idle()
        before = [self._counter(n) for n in names]
        body = {"model": "tiny", "prompt": held_out(1)[0], "return_token_ids": True}
        body |= PROBE | {"cache_salt": f"probe-{self.probes}"}
        async with session.post(
            f"{self.server.url}/v1/completions", json=body
        ) as answer:
            answer.raise_for_status()
            ids = (await answer.json())["choices"][0]["token_ids"]
        await self._until_idle()
        accepted, drafts = (
            self._counter(n) - b for n, b in zip(names, before, strict=True)
        )
        found = (ids, 1 + accepted / max(drafts, 1))
        self.first_probe = self.first_probe or found
        self.probes += 1
        self.mismatches += found != self.first_probe

    async def _until_idle(self) -> None:
        while self._counter("num_requests_running") + self._counter(
            "num_requests_waiting"
        ):
            await asyncio.sleep(0.2)
        # Counters of the last step are exported with the next report.
        await asyncio.sleep(1)

    def _page(self) -> str:
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def _counter(self, name: str) -> float:
        found = re.findall(rf"^vllm:{name}{{[^\n]*}} (\S+)$", self._page(), re.M)
        return sum(map(float, found))

    def _rate(self, low: float, high: float) -> float | None:
        """Tokens per second of the segments that began between two minutes."""
        low, high = low - 0.05, high - 0.05  # Segments may begin a little late.
        rates = [s["tok_s"] for s in self.segments if low <= s["minute"] < high]
        return round(sum(rates) / len(rates), 1) if rates else None

    def write(self) -> dict[str, Any]:
        """Write the record, complete up to now, and return it."""
        page = self._page()
        blocks = int(re.findall(r'num_gpu_blocks="(\d+)"', page)[0])
        written = self._counter("prompt_tokens_total") - self._counter(
            "prefix_cache_hits_total"
        )
        written += self._counter("generation_tokens_total")
        assert self.first_probe is not None
        return write_record(
            self.args.out,
            [{k: round(v, 2) for k, v in s.items()} for s in self.segments],
            minutes=round(self.minutes, 1),
            requests=self.traffic.finished + self.traffic.aborted,
            aborted=self.traffic.aborted,
            failed=self.traffic.failed,
            preemptions=int(self._counter("num_preemptions_total")),
            tok_s_min_5_10=self._rate(5, 10),
            tok_s_last_5=self._rate(self.args.minutes - 5, self.args.minutes),
            probes=self.probes,
            probe_mismatches=self.mismatches,
            probe_accept_length=round(self.first_probe[1], 3),
            kv_blocks=blocks,
            block_size=BLOCK_SIZE,
            block_uses=round(written / BLOCK_SIZE / blocks),
            host_mib=self.host_mib,
            device_mib=self.device_mib,
        )


def resident_mib(server: Server) -> float:
    """Memory of the server's processes that is their own, without shared pages."""
    total = 0
    for pid in (server.process.pid, *server.processes()):
        try:
            resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        except OSError:
            continue
        total += int(resident) - int(shared)
    return total * 4096 / 2**20


def device_used_mib(server: Server) -> float:
    """Memory of the server's processes on GPUs; 0 without one.

    Where the driver does not tell processes apart: all that is used on the first GPU.
    """
    if not ON_GPU:
        return 0.0
    pids = {server.process.pid, *server.processes()}
    rows = _ask_driver("--query-compute-apps=pid,used_memory")
    ours = [row[1] for row in rows if row[0].isdigit() and int(row[0]) in pids]
    if ours and all(mib.isdigit() for mib in ours):
        return float(sum(map(int, ours)))
    return float(_ask_driver("--query-gpu=memory.used")[0][0])


def _ask_driver(query: str) -> list[list[str]]:
    """Fields of the rows that ``nvidia-smi`` prints."""
    found = subprocess.check_output(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], text=True
    )
    return [line.split(", ") for line in found.splitlines()]


def main() -> None:
    """Start the server, soak it, print the record without its series."""
    args = parse_args()
    steps, topk, nodes = map(int, args.shape.split(","))
    speculative = {
        "method": "mtp_tree",
        "num_steps": steps,
        "topk": topk,
        "num_speculative_tokens": nodes,
    }
    flags = ["--block-size", str(BLOCK_SIZE)]
    flags += ["--max-num-seqs", str(args.concurrency)]
    flags += ["--num-gpu-blocks-override", str(args.pool_tokens // BLOCK_SIZE)]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(speculative, Path(folder), *flags) as server,
    ):
        soak = Soak(server, args)
        try:
            asyncio.run(soak.run())
        except Exception:
            print(server.log.read_text()[-4000:], file=sys.stderr)
            raise
        record = soak.write()
    brief = {k: v for k, v in record.items() if k not in ("rows", "versions")}
    print(json.dumps(brief, indent=1))


if __name__ == "__main__":
    main()
