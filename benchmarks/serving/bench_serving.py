"""Tokens per second of no speculation, in-tree chains and trees; write JSON.

    python -m benchmarks.serving.bench_serving --out benchmarks/results/NAME.json

The model is the inflated one (``benchmarks.inflate``): DeepSeek-V3's cost, the trained
tiny model's acceptance. One engine for each of ``--shapes`` serves all batch sizes,
input lengths and temperatures. Prompts are held-out text and lie in the prefix cache;
only steps in which the whole batch decodes are timed. The file is written after every
input length; measurements already in it are kept, so a table can be filled in several
runs, with other batches and inputs.
"""

import argparse
import functools
import gc
import itertools
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command, git_commit, write_record
from benchmarks.inflate import Inflation
from benchmarks.serving import proof
from benchmarks.serving.cost import count_bytes
from benchmarks.serving.loader import open_inflator
from benchmarks.serving.prompts import cut_windows
from benchmarks.serving.report import (
    Row,
    format_table,
    list_others,
    merge,
    stamp,
    summarize,
)
from benchmarks.serving.setup import (
    CPU_SHAPE,
    Workload,
    fill_cache,
    llm_settings,
    write_model,
)
from benchmarks.serving.stopwatch import KernelCount, Stopwatch
from tests.helpers.engine import engine, runner_of
from vllm_mtp.tuning.decode import Window, decode, decode_rounds, same_share
from vllm_mtp.tuning.run import ChoiceWatch
from vllm_mtp.tuning.shapes import Shape

SHAPES = (
    "off chain:1 chain:2 chain:3 chain:4 tree:2,1,2 tree:3,1,3 "
    "tree:2,2,3 tree:2,4,4 tree:3,2,5 tree:3,4,7 tree:4,4,12"
)
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]

SETTLE = 3.0
"""Seconds of a load that ``auto`` serves before it is measured."""

AUTO_STEPS = 60
"""Steps of a load that are measured of ``auto``, at least: the same batches again, so
that its looks at other sizes, one in some 50 to 400 steps, count as often as they do
when it serves for long."""

ROUNDS = {1: 32, 2: 20, 4: 12, 8: 8, 16: 5, 32: 3, 64: 2}
"""Batches of other prompts that are run one after the other; elsewhere one. Accept
lengths of few trees say little."""

OFF_ROUNDS = 1
"""The same without speculation, where every step of a batch takes as long."""

MAX_PROMPTS = 128
"""Different prompts; their KV fills most of the memory at 8k. Larger batches serve each
more than once, from the same cached blocks."""

PROFILED = (4, 12)
"""First and last step whose kernels are counted."""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add(
        "--shapes",
        nargs="+",
        default=SHAPES.split(),
        help="off, auto, auto:shared, chain:N, tree:S,k,N[,F]",
    )
    add("--batches", type=int, nargs="+", default=BATCHES)
    add("--inputs", type=int, nargs="+", default=[1024, 8192])
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    add("--sampled-batches", type=int, nargs="*", default=[1, 8, 32])
    add("--sampled-inputs", type=int, nargs="*", default=[1024])
    add("--tokens", type=int, default=64, help="new tokens a request, at most 128")
    add("--layers", type=int, default=Inflation.num_hidden_layers)
    add("--skip-above", type=int, default=4096, help="see Inflation.skip_above")
    add("--corpus", type=Path, help="prompts from train.py's corpus")
    add("--budget", type=float, default=1e9, help="seconds; start no engine beyond")
    add("--profile", type=int, nargs="*", default=[], help="batches to take apart")
    add("--prove", action="store_true", help="compare ids with the tiny model's")
    add("--compile", action="store_true", help="torch.compile; slow with prompts")
    return parser.parse_args()


class Bench:
    """Runs engines and keeps what they measured."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.begin = time.perf_counter()
        self.on_gpu = torch.cuda.is_available()
        # Compiled models take one way for all sizes.
        skip_above = Inflation.skip_above if args.compile else args.skip_above
        self.shape = (
            Inflation(num_hidden_layers=args.layers, skip_above=skip_above)
            if self.on_gpu
            else CPU_SHAPE
        )
        batches = {*args.batches, *args.sampled_batches}
        num_prompts = max(batch * ROUNDS.get(batch, 1) for batch in batches)
        num_prompts = min(num_prompts, MAX_PROMPTS)
        tokens = max(args.tokens, 80 if args.profile else 0)
        self.workload = Workload(sorted(batches), args.inputs, num_prompts, tokens)
        # Cut before any engine starts, so that too little text is noticed at once.
        self.prompts = {
            length: cut_windows(num_prompts, length, args.corpus, max(args.inputs))
            for length in args.inputs
        }
        self.measured: list[Row] = []
        self.extra: dict[str, Any] = {"engines": {}, "profile": {}, "proof": None}
        self.commands = [command()]
        if args.out.exists():
            before = stamp(json.loads(args.out.read_text()), git_commit())
            self.commands = [before["command"], *self.commands]
            self.measured = before["measured"]
            self.extra = {key: before[key] for key in self.extra}
        self.reference: dict[tuple[Any, ...], list[list[int]]] = {}
        write_model(folder, self.shape)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    def settings(self, speculation: Shape) -> dict[str, Any]:
        """Arguments of ``LLM``."""
        return llm_settings(
            self.folder, self.shape, speculation, self.workload, self.args.compile
        )

    def run(self, speculation: Shape) -> None:
        """Start one engine, measure all that was asked for, write."""
        begin = time.perf_counter()
        with engine(speculation.speculative, **self.settings(speculation)) as llm:
            if self.on_gpu:
                fill_cache(llm)
            started = time.perf_counter() - begin
            if self.args.prove and speculation.family == "off":
                self.prove(proof.generate(llm))
            # Greedy first, as it is what most of the tables are about.
            for sampled, length in itertools.product((False, True), self.args.inputs):
                rows = self.measure(llm, speculation, length, sampled)
                if rows:
                    self.measured = merge(self.measured, rows)
                    self.write()
            for batch in self.args.profile if self.on_gpu else ():
                prompts = self.prompts[min(self.args.inputs)]
                self.profile(llm, speculation, prompts[:batch])
            # Dropped here, or the next engine would find the memory taken.
            del llm
        total = time.perf_counter() - begin
        times = {"start_s": round(started, 1), "total_s": round(total, 1)}
        self.extra["engines"][speculation.name] = times
        self.write()
        print(
            f"== {speculation.name}: {times}, {self.elapsed:.0f} s so far", flush=True
        )

    def write(self) -> None:
        """Write everything measured so far and show the summary."""
        config = open_inflator(self.folder).config
        summary = summarize(self.measured)
        write_record(
            self.args.out,
            summary,
            command=" && ".join(self.commands),
            bytes_read={n: count_bytes(self.shape, config, n) for n in (1, 8, 64, 512)},
            measured=self.measured,
            others=list_others(self.measured),
            **self.extra,
        )
        print(format_table(summary), flush=True)

    def measure(
        self, llm: Any, speculation: Shape, length: int, sampled: bool
    ) -> list[Row]:
        """Rows of one input length, sampled or greedy."""
        args = self.args
        prompts = self.prompts[length]
        points = [
            (temperature, batch)
            for temperature in args.temperatures
            if (temperature > 0) == sampled
            and speculation.serves(temperature)
            and (not sampled or length in args.sampled_inputs)
            for batch in (args.sampled_batches if temperature else args.batches)
        ]
        if not points:
            return []
        begin = time.perf_counter()
        decode(llm, prompts, 0.0, 1)
        print(
            f"{speculation.name}: {len(prompts)} prompts of {length} cached in "
            f"{time.perf_counter() - begin:.1f} s"
        )
        rows = []
        for temperature, batch in points:
            # The first replays and draws of a size are slower.
            warm_up = 3 * speculation.num_steps + 4
            rounds = ROUNDS.get(batch, 1)
            if speculation.family == "off":
                rounds = min(rounds, OFF_ROUNDS)
            cycle = prompts * -(-batch // len(prompts))
            decode(llm, cycle[:batch], temperature, warm_up)
            # It shall have seen the load whose steady state is measured.
            end = time.perf_counter() + (SETTLE if speculation.is_auto else 0)
            starts = itertools.cycle(range(0, rounds * batch, batch))
            while time.perf_counter() < end:
                start = next(starts)
                part = cycle[start : start + batch]
                decode(llm, part, temperature, args.tokens)
            choices = ChoiceWatch(llm) if speculation.is_auto else None
            measure = functools.partial(
                decode_rounds,
                *(llm, cycle, batch, rounds, temperature, args.tokens, choices),
            )
            window = measure()
            while speculation.is_auto and window.steps < AUTO_STEPS:
                again = measure()
                again.ids.clear()
                window.add(again)
            rows.append(self.row(speculation, temperature, length, batch, window))
            if choices is not None:
                rows[-1]["chose"] = choices.most_used()
            print(f"{self.elapsed:.0f} s", _as_words(rows[-1]), flush=True)
        return rows

    def row(
        self,
        speculation: Shape,
        temperature: float,
        length: int,
        batch: int,
        window: Window,
    ) -> Row:
        """One measurement; ids are compared with those of ``off`` in the same run."""
        key = (temperature, batch, length)
        row = {
            "shape": speculation.name,
            "family": speculation.family,
            "temperature": temperature,
            "input_len": length,
            "batch": batch,
            "tok_s": round(window.tokens_per_second, 1),
            "accept_length": round(window.accept_length, 3),
            "step_ms": round(window.step_ms, 3),
            "steps": window.steps,
        }
        if speculation.family == "off":
            self.reference[key] = window.ids
        elif key in self.reference:
            known = self.reference[key]
            row["same_as_off"] = round(same_share(window.ids[: len(known)], known), 3)
        return row

    def profile(self, llm: Any, speculation: Shape, prompts: list[list[int]]) -> None:
        """Take the steps of one batch apart."""
        tokens = (PROFILED[1] + 3) * (speculation.num_steps + 1)
        watch = Stopwatch(runner_of(llm))
        with watch.running():
            window = decode(llm, prompts, 0.0, tokens)
        kernels = KernelCount(*PROFILED)
        decode(llm, prompts, 0.0, tokens, kernels.observe)
        name = f"{speculation.name} batch {len(prompts)}"
        found = {
            "step_ms": round(window.step_ms, 3),
            "parts": watch.report(),
            "trace": kernels.report(),
        }
        self.extra["profile"][name] = found
        print(name, json.dumps(found, indent=1), flush=True)

    def prove(self, inflated: list[Any]) -> None:
        """Compare with the tiny model's outputs, made before."""
        self.extra["proof"] = proof.compare(inflated, self.tiny_outputs)
        print("proof:", self.extra["proof"], flush=True)

    def run_all(self) -> list[str]:
        """All engines, as far as the budget goes; return those that failed."""
        if self.args.prove:
            off = self.settings(Shape.parse("off"))
            keep = ("attention_backend", "dtype", "max_num_batched_tokens")
            settings = {key: off[key] for key in keep if key in off}
            self.tiny_outputs = proof.run_tiny(**settings)
        longest, failed = 0.0, []
        for name in self.args.shapes:
            if self.elapsed + longest > self.args.budget:
                print(f"no time left for {name}", flush=True)
                continue
            before = self.elapsed
            try:
                self.run(Shape.parse(name))
            except Exception as error:
                # The others' numbers are worth having; their memory is needed.
                traceback.print_exc()
                traceback.clear_frames(error.__traceback__)
                failed.append(name)
                self.write()
            gc.collect()
            longest = max(longest, self.elapsed - before)
        return failed


def _as_words(row: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in row.items())


def main() -> None:
    """Measure what the command line asks for."""
    args = parse_args()
    for name in args.shapes:
        Shape.parse(name)
    with tempfile.TemporaryDirectory() as folder:
        failed = Bench(args, Path(folder)).run_all()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
