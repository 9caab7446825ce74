"""Degenerate trees and very short prompts."""

import pytest
import torch

from tests.e2e.test_ids import mtp_tree, sampling
from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.prompts import held_out

SHORT = tuple(range(1, 11))
"""Prompts of one token to more than the rows of a verify pass."""

CORNERS = [(2, 2, 6), (4, 4, 52)]
GRID = [
    (steps, topk, nodes)
    for steps in range(1, 5)
    for topk in range(1, 5)
    for nodes in sorted({steps, min(7, topk + (steps - 1) * topk**2)})
    if nodes <= topk + (steps - 1) * topk**2
]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    with engine(max_num_seqs=10) as llm:
        return generate(llm, held_out(10, SHORT), sampling(10, (0.0, 0.8), 12))


@pytest.mark.parametrize(
    "shape",
    [*CORNERS, *(pytest.param(s, marks=pytest.mark.slow) for s in GRID)],
    ids=str,
)
def test_short_prompts_in_any_shape(
    shape: tuple[int, int, int], reference: list[list[int]]
) -> None:
    """A request is verified by its state, never by its length: ten prompts of one to
    ten tokens together, so that some still decode while others are read."""
    with engine(mtp_tree(*shape), max_num_seqs=10) as llm:
        ids = generate(llm, held_out(10, SHORT), sampling(10, (0.0, 0.8), 12))
        assert ids == reference
        alone = generate(llm, held_out(3, SHORT)[2:], sampling(3, (0.0,), 12)[2:])
    assert alone == reference[2:3]


def test_buffers_are_there_before_the_kv_pool_is_sized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scratch caches from the load on; logits of every node in the profiling pass."""
    with engine(mtp_tree(2, 2, 3)) as llm:
        runner = runner_of(llm)
        impls = [
            m.impl for m in runner.speculator.model.modules() if hasattr(m, "impl")
        ]
        caches = [impl.scratch for impl in impls]
        assert caches
        assert all(cache is not None for cache in caches)
        rows = []
        compute = runner.model.compute_logits

        def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden))
            return compute(hidden)

        monkeypatch.setattr(runner.model, "compute_logits", compute_logits)
        width = runner.model_config.get_hidden_size()
        runner._dummy_sampler_run(torch.zeros(2, width))
        assert max(rows) == runner.max_num_reqs * 4
        # A step writes to the caches that were allocated at load.
        generate(llm, held_out(2), sampling(2, (0.0,), 8))
        assert all(a is b.scratch for a, b in zip(caches, impls, strict=True))


def test_a_pass_runs_before_graphs_are_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM profiles memory with dummy passes, drafts included, before any graph."""
    with engine(mtp_tree(2, 2, 3)) as llm:
        runner = runner_of(llm)
        monkeypatch.setattr(runner.speculator, "level_graphs", {})
        monkeypatch.setattr(runner.speculator, "decode_cudagraph_manager", None)
        runner._dummy_run(8, uniform_decode=True, is_profile=True)
