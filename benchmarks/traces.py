"""What benchmarks of traced trees share: their options, and the trees."""

import argparse
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path

import torch

from benchmarks.acceptance import CPU_SETTINGS, GPU_SETTINGS, generate, tree
from tests.helpers.engine import engine
from vllm_mtp.trace.load import load_trace
from vllm_mtp.trace.schema import Step


def parse_args(doc: str) -> tuple[Path, list[float]]:
    """The file to write, and the temperatures to trace at."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperatures", default="0,1.0")
    args = parser.parse_args()
    return args.out, [float(text) for text in args.temperatures.split(",")]


def count_accepted(step: Step, kept: Container[int]) -> int:
    """Nodes that the trace accepted of a tree with these of its rows.

    ``kept`` has the parents of what it has, as the best rows always do.
    """
    return sum(row in kept for row in step.path[1:])


def trace_trees(shape: tuple[int, int, int], temperature: float) -> Sequence[Step]:
    """Every tree of the tiny model on the held-out prompts of ``acceptance``."""
    settings = GPU_SETTINGS if torch.cuda.is_available() else CPU_SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trees.jsonl"
        trace = {"path": str(path), "text": False, "max_requests": 64}
        config = {**tree(*shape), "trace": {**trace, "queue_size": 4096}}
        with engine(config, **settings) as llm:
            generate(llm, temperature)
        return load_trace(path).steps
