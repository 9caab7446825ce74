"""Token ids with trees equal token ids without speculation, in the real engine."""

from typing import Any

import pytest

from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.prompts import held_out

SHAPES = [(1, 1, 1), (1, 4, 4), (2, 4, 3), (3, 1, 3), (3, 4, 7), (4, 2, 12), (5, 8, 32)]
LENGTHS = (1, 2, 3, 7, 8, 9, 33, 120)
TOKENS = 64


def mtp_tree(steps: int, topk: int, nodes: int) -> dict[str, Any]:
    return {
        "method": "mtp_tree",
        "num_steps": steps,
        "topk": topk,
        "num_speculative_tokens": nodes,
    }


def sampling(count: int, temperatures: tuple[float, ...], tokens: int = TOKENS) -> Any:
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=temperatures[i % len(temperatures)],
            seed=1000 + i,
            max_tokens=tokens,
            ignore_eos=True,
        )
        for i in range(count)
    ]


CASES = {
    "mixed-8": (8, (0.0, 0.8)),
    "greedy-4": (4, (0.0,)),
    "sampled-1": (1, (0.8,)),
}
"""Batch size and the temperatures in it; every shape runs the first."""


@pytest.fixture(scope="module")
def reference() -> dict[str, list[list[int]]]:
    """Token ids without speculation, alone in their batches as later with trees."""
    with engine() as llm:
        return {
            name: generate(llm, held_out(n, LENGTHS), sampling(n, temperatures))
            for name, (n, temperatures) in CASES.items()
        }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_ids_equal_no_speculation(
    shape: tuple[int, int, int], reference: dict[str, list[list[int]]]
) -> None:
    """Float32, greedy and seeded requests in one batch, prompts from one token up.

    Catches: siblings committed from the wrong row, RoPE positions by row instead of
    depth, a mask that shows a row its sibling, noise keyed by row.
    """
    names = list(CASES) if shape == (3, 4, 7) else ["mixed-8"]
    with engine(mtp_tree(*shape)) as llm:
        for name in names:
            count, temperatures = CASES[name]
            ids = generate(llm, held_out(count, LENGTHS), sampling(count, temperatures))
            assert ids == reference[name], name
        assert accepted(llm) > 0, "nothing was accepted, so nothing was tested"


def accepted(llm: Any) -> int:
    name = "vllm:spec_decode_num_accepted_tokens"
    return next(int(m.value) for m in llm.get_metrics() if m.name == name)


def test_later_siblings_are_committed(reference: dict[str, list[list[int]]]) -> None:
    """Proof of use: branches other than the first child won, and their KV moved."""
    paths: list[list[int]] = []
    with engine(mtp_tree(3, 4, 7)) as llm:
        runner = runner_of(llm)
        commit = runner.commit

        def spy(hidden: Any, batch: Any, num_accepted: Any) -> None:
            for row, count in enumerate(num_accepted.tolist()):
                paths.append(runner.tree.path[row, :count].tolist())
            commit(hidden, batch, num_accepted)

        runner.commit = spy
        ids = generate(llm, held_out(8, LENGTHS), sampling(8, (0.0, 0.8)))
    assert ids == reference["mixed-8"]
    moved = [p for p in paths if any(row != j for j, row in enumerate(p))]
    assert len(moved) >= 10, f"{len(moved)} of {len(paths)} paths moved anything"
