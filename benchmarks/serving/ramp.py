"""``"shape": "auto"`` against no speculation while load and text change; write JSON.

    python -m benchmarks.serving.ramp --out benchmarks/results/NAME.json

Concurrency goes up in stages and back; in each stage the text is easy to predict at
first (held-out prompts, greedy), then hard (random prompts, temperature 1.3). Every
engine runs the same schedule by time, so their windows compare directly. The model is
that of ``bench_serving``. Where concurrency falls, the requests added last are aborted,
so that a slower engine does not run more of them for longer. The file is written after
every engine; measurements already in it are kept.
"""

import argparse
import gc
import json
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams

from benchmarks.common import git_commit, write_record
from benchmarks.inflate import Inflation
from benchmarks.serving.loader import open_inflator
from benchmarks.serving.prompts import cut_windows
from benchmarks.serving.schedule import (
    Row,
    Schedule,
    make_rows,
    make_stages,
    worst_span,
)
from benchmarks.serving.setup import (
    CPU_SHAPE,
    Workload,
    fill_cache,
    llm_settings,
    write_model,
)
from tests.helpers.engine import engine
from vllm_mtp.auto.ladder import graph_batches
from vllm_mtp.tuning.decode import decode, name_of, streamed
from vllm_mtp.tuning.run import policy_of
from vllm_mtp.tuning.shapes import Shape

NUM_PROMPTS = 1024
"""Easy prompts, used in turn."""

HARD_TEMPERATURE = 1.3

WARM_UP_TOKENS = 24

Request = tuple[list[int], SamplingParams]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--shapes", nargs="+", default=["off", "auto"], choices=["off", "auto"])
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64, 256, 64, 16, 4, 1],
        help="one a stage",
    )
    add("--stage-seconds", type=float, default=10)
    add("--window", type=float, default=5, help="seconds")
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, nargs=2, default=[128, 384], metavar=("MIN", "MAX"))
    add("--skip-above", type=int, default=4096, help="see Inflation.skip_above")
    return parser.parse_args()


@dataclass
class Tally:
    """What an engine did in one window."""

    tokens: int = 0
    steps: int = 0
    running: int = 0
    """Requests, summed over steps."""

    passes: int = 0
    """Decode passes, one a request and step."""

    decoded: int = 0
    """Tokens that decode passes emitted: all but the first of each request."""

    mixed: int = 0
    """Steps in which a request got its first token."""

    rungs: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Steps by the (N, S) that ``auto`` had chosen."""

    def report(self, seconds: float) -> Row:
        """As it is written."""
        steps = max(self.steps, 1)
        row: Row = {
            "tok_s": round(self.tokens / seconds, 1),
            "accept_length": round(self.decoded / max(self.passes, 1), 3),
            "running": round(self.running / steps, 1),
            "steps": self.steps,
            "mixed_share": round(self.mixed / steps, 3),
        }
        if self.rungs:
            row["chose"] = [
                [*rung, round(count / steps, 3)]
                for rung, count in self.rungs.most_common()
            ]
        return row


class Requests:
    """The requests of a run; each follows from its number alone."""

    def __init__(
        self, prompts: list[list[int]], vocab_size: int, output_len: tuple[int, int]
    ) -> None:
        self.prompts, self.vocab_size = prompts, vocab_size
        self.output_len = output_len

    def make(self, number: int, text: str) -> Request:
        """Prompt and settings of an ``easy`` or ``hard`` request."""
        rng = random.Random(number)
        prompt = self.prompts[number % len(self.prompts)]
        max_tokens = rng.randint(*self.output_len)
        temperature = 0.0
        if text == "hard":
            prompt = [rng.randrange(self.vocab_size) for _ in prompt]
            temperature = HARD_TEMPERATURE
        return prompt, streamed(temperature, number, max_tokens)


class Traffic:
    """Keeps as many requests running as the schedule says, and counts."""

    def __init__(
        self, llm: Any, schedule: Schedule, make: Callable[[int, str], Request]
    ) -> None:
        self.engine, self.schedule, self.make = llm.llm_engine, schedule, make
        self.policy = policy_of(llm)
        self.started: dict[str, bool] = {}
        """Requests that run -> whether they have their first token."""

        self.tallies = [Tally() for _ in range(schedule.num_windows)]
        self.changes: list[float] = []
        self.added = self.finished = self.aborted = self.failed = 0
        self.rung = self.policy.current if self.policy else 0
        self.begin = 0.0

    def run(self, report: Callable[[int, Tally], None]) -> None:
        """The whole schedule, then drain; ``report`` is told of each window."""
        self.begin = time.perf_counter()
        window = 0
        try:
            while window < self.schedule.num_windows:
                self._follow(window)
                outputs = self.engine.step()
                seconds = time.perf_counter() - self.begin
                now = self.schedule.window_at(seconds)
                for passed in range(window, now):
                    report(passed, self.tallies[passed])
                window = now
                if window < self.schedule.num_windows:
                    self._count(self.tallies[window], outputs, seconds)
                self._retire(outputs)
            while self.started:
                self._retire(self.engine.step())
        except Exception:
            # What was measured before is worth having.
            traceback.print_exc()
            self.failed += len(self.started)

    def _follow(self, window: int) -> None:
        """As many requests as the schedule has."""
        wanted = self.schedule.concurrency_of(window)
        surplus = list(self.started)[wanted:]
        if surplus:
            self.engine.abort_request(surplus)
            self.aborted += len(surplus)
            for name in surplus:
                del self.started[name]
        while len(self.started) < wanted:
            prompt, params = self.make(self.added, self.schedule.text_of(window))
            request_id = f"ramp{self.added}"
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            self.started[request_id] = False
            self.added += 1

    def _count(self, tally: Tally, outputs: list[Any], seconds: float) -> None:
        """Add a step to its window."""
        tally.steps += 1
        tally.running += len(self.started)
        is_mixed = False
        for output in outputs:
            new = len(output.outputs[0].token_ids)
            tally.tokens += new
            if self.started[name_of(output)]:
                tally.passes += 1
                tally.decoded += new
            else:
                is_mixed = True
        tally.mixed += is_mixed
        if self.policy is None:
            return
        rung = self.policy.ladder[self.policy.current]
        tally.rungs[tuple(rung.to_list())] += 1
        if self.policy.current != self.rung:
            self.rung = self.policy.current
            self.changes.append(round(seconds, 3))

    def _retire(self, outputs: list[Any]) -> None:
        """Note first tokens, forget requests that finished."""
        for output in outputs:
            name = name_of(output)
            self.started[name] = True
            if output.finished:
                del self.started[name]
                self.finished += 1
                self.failed += output.outputs[0].finish_reason != "length"


class Ramp:
    """Runs the engines and keeps what they measured."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.schedule = Schedule(
            tuple(args.concurrency), args.stage_seconds, args.window
        )
        self.shape = (
            Inflation(skip_above=args.skip_above)
            if torch.cuda.is_available()
            else CPU_SHAPE
        )
        largest = max(args.concurrency)
        batches = graph_batches(largest)
        self.workload = Workload(
            batches, [args.input_len], largest, max(args.output_len)
        )
        self.prompts = cut_windows(NUM_PROMPTS, args.input_len)
        self.settings: Row = {
            "concurrency": args.concurrency,
            "stage_seconds": args.stage_seconds,
            "window": args.window,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "skip_above": self.shape.skip_above,
        }
        self.measured: dict[str, Row] = {}
        if args.out.exists():
            self.measured = self._load()
        write_model(folder, self.shape)

    def _load(self) -> dict[str, Row]:
        """What the file has, which must be of the same schedule and code."""
        before = json.loads(self.args.out.read_text())
        for key, value in {"commit": git_commit(), **self.settings}.items():
            found = before.get(key)
            if found != value:
                raise SystemExit(
                    f"{self.args.out} was measured with {key}={found}, this run "
                    f"has {value}. Use the same, or another --out."
                )
        measured: dict[str, Row] = before["measured"]
        return measured

    def run(self, name: str) -> None:
        """Start one engine, warm it up, run the schedule, write."""
        speculation = Shape.parse(name)
        settings = llm_settings(
            self.folder, self.shape, speculation, self.workload, compiled=False
        )
        with engine(speculation.speculative, **settings) as llm:
            if torch.cuda.is_available():
                fill_cache(llm)
            self._warm_up(llm)
            self.measured[name] = self._measure(llm, name)
            # Dropped here, or the next engine would find the memory taken.
            del llm
        gc.collect()
        self.write()

    def _warm_up(self, llm: Any) -> None:
        """Run every concurrency, so that no first replay is counted."""
        begin = time.perf_counter()
        for temperature in (0.0, HARD_TEMPERATURE):
            for batch in sorted(set(self.args.concurrency)):
                decode(llm, self.prompts[:batch], temperature, WARM_UP_TOKENS)
        print(f"warmed up in {time.perf_counter() - begin:.1f} s", flush=True)

    def _measure(self, llm: Any, name: str) -> Row:
        vocab_size = open_inflator(self.folder).config["vocab_size"]
        requests = Requests(self.prompts, vocab_size, tuple(self.args.output_len))
        traffic = Traffic(llm, self.schedule, requests.make)
        seconds, schedule = self.schedule.window, self.schedule

        def show(window: int, tally: Tally) -> None:
            words = {
                "stage": schedule.stage_of(window),
                "concurrency": schedule.concurrency_of(window),
                "text": schedule.text_of(window),
                **tally.report(seconds),
            }
            print(name, *(f"{k}={v}" for k, v in words.items()), flush=True)

        traffic.run(show)
        return {
            "finished": traffic.finished,
            "aborted": traffic.aborted,
            "failed": traffic.failed,
            "changes": traffic.changes,
            "windows": [tally.report(seconds) for tally in traffic.tallies],
        }

    def write(self) -> Row:
        """Write everything measured so far."""
        auto = self.measured.get("auto")
        brief: Row = {
            "min_auto_over_off_10s": worst_span(self.schedule, self.measured),
            "finished": {k: run["finished"] for k, run in self.measured.items()},
            "failed": sum(run["failed"] for run in self.measured.values()),
            "changes": len(auto["changes"]) if auto else None,
        }
        stages = make_stages(self.schedule, auto["changes"]) if auto else []
        write_record(
            self.args.out,
            make_rows(self.schedule, self.measured),
            **self.settings,
            **brief,
            stages=stages,
            measured=self.measured,
        )
        print(json.dumps(brief), flush=True)
        return brief


def main() -> None:
    """Measure what the command line asks for."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ramp = Ramp(args, Path(folder))
        for name in args.shapes:
            ramp.run(name)
    failed = sum(ramp.measured[name]["failed"] for name in args.shapes)
    if failed:
        raise SystemExit(f"{failed} requests failed")


if __name__ == "__main__":
    main()
