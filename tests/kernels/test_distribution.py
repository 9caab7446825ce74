"""Drafting and verification together leave the target's distribution alone.

A Markov target over 16 tokens, drafted by an unrelated Markov draft with the real
kernels (top-k with noise, expansion, packing, walk) and vLLM's own ``gumbel_sample``.
The first three emitted tokens are compared with the exact distribution by chi-squared;
the threshold is vLLM's own for such tests, df + 10 * sqrt(2 * df).

With wrong noise the statistics exceed it, which is asserted too: noise that ignores
the request's seed, and, on a GPU, noise keyed by the root's position at every row, the
fault that a sampler would have without tree positions. 50,000 trials on a GPU; 200 in
the interpreter, where the second fault would take some 3,000 to show. ``pytest -s``
prints the statistics (docs/verification.md).
"""

import math

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from tests.helpers.trees import DEVICE
from vllm_mtp.buffers import TreeBuffers, build_tree_buffers
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels.tree_expand import expand_tree
from vllm_mtp.kernels.tree_pack import pack_tree
from vllm_mtp.kernels.tree_topk import build_topk_workspace, tree_topk
from vllm_mtp.kernels.tree_verify import verify_tree

V, ROOT, START, WANTED = 16, 3, 100, 3
GPU_ONLY = pytest.mark.skipif(DEVICE != "cuda", reason="needs thousands of trials")
SHAPE = TreeShape(num_steps=2, topk=3, num_nodes=7)
TRIALS = 50_000 if DEVICE == "cuda" else 200
BATCH = 10_000 if DEVICE == "cuda" else 200


def table(seed: int) -> torch.Tensor:
    """``[V, V]`` logits of the next token by the last one."""
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(V, V, generator=generator)).to(DEVICE)


def restrict(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Top-k and top-p by sorting, as vLLM's PyTorch path does."""
    ordered, order = logits.sort(dim=-1)
    if top_k is not None:
        ordered = ordered.masked_fill(
            torch.arange(V, device=DEVICE) < V - top_k, float("-inf")
        )
    mass = ordered.softmax(-1).cumsum(-1)
    drop = mass <= 1 - top_p
    drop[..., -1] = False
    kept = ordered.masked_fill(drop, float("-inf")) if top_p < 1 else ordered
    return torch.empty_like(logits).scatter_(-1, order, kept)


class Trials:
    """A batch of requests that differ in their seed alone."""

    def __init__(self, target: torch.Tensor, first_seed: int, wrong: str) -> None:
        self.target, self.draft, self.wrong = target, table(2), wrong
        device = torch.device(DEVICE)
        self.tree: TreeBuffers = build_tree_buffers(SHAPE, BATCH, 8 * BATCH, device)
        self.workspace = build_topk_workspace(BATCH * SHAPE.topk, V, DEVICE)
        self.idx = torch.arange(BATCH, device=DEVICE)
        self.temperature = torch.ones(BATCH, device=DEVICE)
        self.seeds = first_seed + 7919 * torch.arange(BATCH, device=DEVICE)
        self.roots = torch.full((BATCH,), ROOT, device=DEVICE)
        self.positions = torch.full((BATCH,), START, device=DEVICE)
        self.emitted = torch.full((BATCH, 16), -1, device=DEVICE)
        self.count = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)

    def step(self) -> None:
        """Draft, verify, emit for every request."""
        tokens = self._draft()
        rows = torch.cat([self.roots[:, None], tokens], dim=1).flatten()
        depths, seeds = self.tree.depths, self.seeds
        if self.wrong == "position":
            depths = torch.zeros_like(depths)
        if self.wrong == "seed":
            seeds = torch.full_like(seeds, 7)
        row_positions = (self.positions[:, None] + depths).flatten()
        drawn = gumbel_sample(
            self.target[rows].contiguous(),
            self.idx.repeat_interleave(SHAPE.num_rows),
            self.temperature,
            seeds,
            row_positions,
            apply_temperature=False,
            is_drafting=False,
        )
        emitted = torch.empty(BATCH, SHAPE.num_rows, dtype=torch.int64, device=DEVICE)
        count = torch.empty(BATCH, dtype=torch.int32, device=DEVICE)
        starts = SHAPE.num_rows * torch.arange(BATCH + 1, device=DEVICE)
        verify_tree(self.tree, drawn, rows, self.idx, starts.int(), emitted, count)
        for j in range(SHAPE.num_steps + 1):
            here = (j < count) & (self.count + j < 16)
            place = (self.count + j).clamp(max=15)
            old = self.emitted[self.idx, place]
            self.emitted[self.idx, place] = torch.where(here, emitted[:, j], old)
        self.roots = emitted[self.idx, count.long() - 1]
        self.positions = self.positions + count
        self.count = self.count + count

    def _draft(self) -> torch.Tensor:
        k = SHAPE.topk
        hidden = torch.zeros(BATCH, 1, device=DEVICE)
        hidden_out = torch.zeros(BATCH * k, 1, device=DEVICE)
        ids = torch.zeros(BATCH * k, dtype=torch.int32, device=DEVICE)
        tokens = torch.zeros(BATCH, SHAPE.num_nodes, dtype=torch.int64, device=DEVICE)
        logits = self.draft[self.roots]
        for depth in range(SHAPE.num_steps):
            tree_topk(
                logits,
                self.tree.topk_ids,
                self.tree.topk_logprobs,
                self.idx,
                self.temperature,
                self.seeds,
                self.positions,
                depth,
                self.workspace,
            )
            expand_tree(self.tree, depth + 1, self.idx, hidden, hidden_out, ids)
            logits, hidden = self.draft[ids.long()], hidden_out.clone()
        pack_tree(self.tree, self.idx, tokens)
        return tokens


def run(target: torch.Tensor, wrong: str = "") -> tuple[torch.Tensor, float]:
    """First three tokens of every trial, and the mean accept length."""
    found, steps, tokens = [], 0, 0
    for first in range(0, TRIALS, BATCH):
        trials = Trials(target, 1_000_003 * (first + 1), wrong)
        while int(trials.count.min()) < WANTED:
            trials.step()
            steps += BATCH
        tokens += int(trials.count.sum())
        found.append(trials.emitted[:, :WANTED])
    return torch.cat(found).cpu(), tokens / steps


def statistics(found: torch.Tensor, target: torch.Tensor) -> list[tuple[float, float]]:
    """(chi-squared, threshold) of each token; bins below 5 expected are merged."""
    transition = target.double().softmax(-1).cpu()
    expected, results = transition[ROOT], []
    for column in range(WANTED):
        counts = torch.bincount(found[:, column], minlength=V).double()
        wanted = expected * found.shape[0]
        big = wanted >= 5
        observed = torch.cat([counts[big], counts[~big].sum()[None]])
        wanted = torch.cat([wanted[big], wanted[~big].sum()[None]])
        keep = wanted > 0
        assert observed[~keep].sum() == 0, "a token of probability 0 was emitted"
        terms = (observed - wanted)[keep] ** 2 / wanted[keep]
        df = int(keep.sum()) - 1
        results.append((float(terms.sum()), df + 10 * math.sqrt(2 * df)))
        expected = expected @ transition
    return results


def show(name: str, results: list[tuple[float, float]]) -> None:
    texts = [f"{statistic:.1f} < {threshold:.1f}" for statistic, threshold in results]
    print(f"\n{name}, {TRIALS} trials, tokens one to three: {', '.join(texts)}")


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        pytest.param(None, 1.0, id="all"),
        pytest.param(None, 0.8, id="p"),
        pytest.param(4, 1.0, id="k"),
    ],
)
def test_emitted_tokens_follow_the_target(top_k: int | None, top_p: float) -> None:
    target = restrict(table(1), top_k, top_p)
    found, accept_length = run(target)
    assert accept_length > 1.2, "no branch was ever accepted"
    results = statistics(found, target)
    show(f"top_k {top_k}, top_p {top_p}", results)
    for statistic, threshold in results:
        assert statistic < threshold


@pytest.mark.parametrize("wrong", ["seed", pytest.param("position", marks=GPU_ONLY)])
def test_wrong_noise_is_noticed(wrong: str) -> None:
    """Noise without the seed is one text for all; without the depth it repeats."""
    target = table(1)
    found, _ = run(target, wrong)
    results = statistics(found, target)
    show(f"wrong {wrong}", results)
    first = 0 if wrong == "seed" else 1
    assert any(statistic > threshold for statistic, threshold in results[first:])
