"""Drafters that are never right, or not even numbers: slower, and the same tokens."""

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


def run(speculative: Any, **settings: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with engine(speculative, **settings) as llm:
        params = sampling(4, (0.0, 0.8), TOKENS)
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
