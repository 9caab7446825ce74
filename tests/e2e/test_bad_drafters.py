"""Drafters that are never right, or not even numbers: slower, and the same tokens."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_ids import mtp_tree, sampling
from tests.helpers.engine import MODEL, counters, engine, generate
from tests.helpers.prompts import held_out

TOKENS = 24


def spoiled_model(target: Path, value: float | None) -> str:
    """The tiny model with random (None) or constant weights where the draft starts."""
    shutil.copytree(MODEL, target)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "eh_proj" not in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator) * 0.05
        spoiled = noise if value is None else torch.full(tensor.shape, value)
        tensors[name] = spoiled.to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def run(
    speculative: Any,
    temperatures: tuple[float, ...] = (0.0, 0.8),
    tokens: int = TOKENS,
    **settings: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    with engine(speculative, **settings) as llm:
        params = sampling(4, temperatures, tokens)
        return generate(llm, held_out(4, (1, 9, 20, 33)), params), counters(llm)


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    return run(None)[0]


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf")], ids=["random", "nan", "inf"]
)
def test_output_is_right_and_every_step_makes_progress(
    value: float | None, reference: list[list[int]], tmp_path: Path
) -> None:
    model = spoiled_model(tmp_path / "model", value)
    ids, found = run(mtp_tree(3, 4, 7), model=model)
    assert ids == reference
    if value is not None:
        assert found["num_accepted_tokens"] == 0
        # One token a step: the first of each request comes from its prefill.
        assert found["num_drafts"] == 4 * (TOKENS - 1)


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    """The same in float16, whose range is what such checkpoints run out of."""
    model = spoiled_model(tmp_path / "model", float("nan"))
    wanted, _ = run(None, (0.0,), dtype="float16")
    found, counted = run(mtp_tree(3, 4, 7), (0.0,), dtype="float16", model=model)
    assert found == wanted
    assert counted["num_accepted_tokens"] == 0
    found, counted = run(mtp_tree(3, 4, 7), (0.0,), dtype="float16")
    assert found == wanted
    assert counted["num_accepted_tokens"] > 40


SHAPES = [(3, 1, 3), (3, 4, 7), (2, 8, 24)]
QUICK = [("trained", SHAPES[2]), ("random", SHAPES[0]), ("random", SHAPES[1])]
CASES = [(drafter, shape, TOKENS) for drafter, shape in QUICK]
LONG = [(drafter, shape, 128) for drafter in ("trained", "random") for shape in SHAPES]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafters")
    return {"trained": str(MODEL), "random": spoiled_model(folder / "random", None)}


@functools.cache
def sampled(tokens: int) -> list[list[int]]:
    """Token ids without speculation at temperature 1."""
    return run(None, (1.0,), tokens)[0]


@pytest.mark.parametrize(
    ("drafter", "shape", "tokens"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=str,
)
def test_the_seed_alone_decides(
    drafter: str, shape: tuple[int, int, int], tokens: int, drafters: dict[str, str]
) -> None:
    """At temperature 1, whatever drafts and in whatever trees."""
    ids, found = run(mtp_tree(*shape), (1.0,), tokens, model=drafters[drafter])
    assert ids == sampled(tokens)
    share = found["num_accepted_tokens"] / found["num_drafts"]
    # The draft's top candidates of a random layer still carry the target's noise.
    assert share > 0.8 if drafter == "trained" else share < 0.8
