"""How many experts the rows of a step reach: text, and what step costs are timed with.

    python -m benchmarks.experts --out benchmarks/results/experts.json

A MoE step reads the experts that any of its rows goes to. ``"shape": "auto"`` times
steps of random tokens, some of them repeated within a request; text repeats itself too.
The tiny model runs both on a CPU; the inputs of its routers go to random routers of
DeepSeek-V3's size (256 experts in 8 groups; 8 experts of 4 groups a row), as those of
the inflated model do (``benchmarks.inflate``). A row: ``batch``, ``nodes``, ``depth``,
and the mean number of different experts a layer: ``text`` (greedy, held out; passes in
which every request of the batch decodes), ``timed`` (as measured), ``random`` (the same
without repeats).
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams

from benchmarks.common import write_record
from benchmarks.inflate import Inflation
from benchmarks.serving.prompts import cut_windows
from tests.helpers.engine import engine, generate, runner_of
from vllm_mtp.auto import profile
from vllm_mtp.auto.ladder import Rung
from vllm_mtp.tuning.run import policy_of

NODES = (0, 3, 4, 7, 12)
BATCHES = (1, 2, 8, 32)
PROMPT, TOKENS = 129, 24
ROUTERS = 6
"""Random routers behind each of the model's own."""

TIMED_STEPS = 6
REQUESTS = 32
"""Of text, for every batch size; the timed tokens are drawn anew for each step."""


class Routers:
    """Counts different experts among the rows that reach the model's routers."""

    def __init__(self, model: torch.nn.Module, hidden: int) -> None:
        shape = Inflation()
        self.groups, self.topk_group = shape.n_group, shape.topk_group
        self.topk = shape.num_experts_per_tok
        torch.manual_seed(0)
        self.weights = torch.randn(ROUTERS, shape.n_routed_experts, hidden)
        self.weights /= hidden**0.5
        self.caught: list[Tensor] = []
        self.mean = torch.zeros(hidden)
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_pre_hook(self._catch)

    def _catch(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self.caught.append(args[0].detach().float().clone())

    @contextmanager
    def catching(self) -> Iterator[list[Tensor]]:
        """Inputs of the routers inside of it, ``[rows, hidden]`` a layer and pass."""
        self.caught = caught = []
        yield caught
        self.caught = []

    def count(self, caught: list[Tensor], rows: int) -> float:
        """Different experts a pass of so many rows reaches, on average."""
        found = [
            self._reached(hidden, router)
            for hidden in caught
            if len(hidden) == rows
            for router in self.weights
        ]
        return round(mean(found), 1)

    def _reached(self, hidden: Tensor, router: Tensor) -> int:
        # What all tokens have in common says nothing: see Inflator._fill_router.
        unit = self.mean / self.mean.norm()
        router = router - (router @ unit)[:, None] * unit
        scores = (hidden @ router.T).sigmoid()
        grouped = scores.view(len(scores), self.groups, -1)
        best = grouped.topk(2).values.sum(-1).topk(self.topk_group).indices
        open_groups = torch.zeros(grouped.shape[:2]).scatter_(1, best, 1.0)
        grouped = grouped.masked_fill(open_groups[..., None] == 0, -1.0)
        return len(grouped.flatten(1).topk(self.topk).indices.unique())


def main() -> None:
    """Measure every size and batch; write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prompts = cut_windows(REQUESTS, PROMPT, None, PROMPT)
    rows: list[dict[str, Any]] = []
    settings = {"max_num_seqs": max(BATCHES), "max_model_len": 256}
    with engine(
        {"method": "mtp_tree", "shape": "auto"}, skip_tokenizer_init=True, **settings
    ) as llm:
        runner, policy = runner_of(llm), policy_of(llm)
        hidden = runner.model_config.get_hidden_size()
        routers = Routers(runner.model, hidden)
        with routers.catching() as caught:
            generate(llm, prompts, SamplingParams(temperature=0, max_tokens=1))
        routers.mean = torch.cat(caught).mean(0)
        for index, rung in enumerate(policy.ladder):
            if rung.is_shared or rung.num_nodes not in NODES:
                continue
            policy.choose = lambda batch, context, index=index: index
            for batch in BATCHES:
                rows.append(measure(llm, runner, routers, rung, batch, prompts))
                print(rows[-1], flush=True)
                write_record(args.out, rows, new_words=profile.NEW_WORDS)


def measure(
    llm: Any,
    runner: Any,
    routers: Routers,
    rung: Rung,
    batch: int,
    prompts: list[list[int]],
) -> dict[str, Any]:
    """One row of the record."""
    size = batch * (rung.num_nodes + 1)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with routers.catching() as text:
        for start in range(0, REQUESTS, batch):
            generate(llm, prompts[start : start + batch], params)
    counts = {"text": routers.count(text, size)}
    usual = profile.NEW_WORDS
    for name, new_words in (("timed", usual), ("random", math.inf)):
        profile.NEW_WORDS = new_words
        with routers.catching() as dummy:
            for _ in range(TIMED_STEPS):
                runner._run_dummy_step(rung, batch, PROMPT)
        counts[name] = routers.count(dummy, size)
    profile.NEW_WORDS = usual
    return {
        "batch": batch,
        "nodes": rung.num_nodes,
        "depth": rung.num_steps,
        **counts,
    }


if __name__ == "__main__":
    main()
