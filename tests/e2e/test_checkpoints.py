"""Drafts do not depend on where the MTP layer was stored, in the real engine."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import save_model
from tests.helpers.engine import MODEL, counters, engine, generate, runner_of
from tests.helpers.fp8_tiny import save_widened
from tests.helpers.prompts import held_out
from vllm_mtp.checkpoint.export import export_nextn
from vllm_mtp.config import SettingsError

TOKENS = 24
LENGTHS = (12, 20, 33, 48)


@dataclass
class Run:
    """What one engine said and drafted."""

    tokens: list[list[int]]

    logits: list[torch.Tensor]
    """Of the draft model, call by call, in the order of the engine's steps."""

    accepted_per_step: float


def run(target: Path, draft: Path | None = None) -> Run:
    from vllm import SamplingParams

    speculative: dict[str, Any] = {"method": "mtp_tree", "num_steps": 3, "topk": 2}
    if draft is not None:
        speculative["model"] = str(draft)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with engine(speculative, model=str(target), dtype="bfloat16") as llm:
        model = runner_of(llm).speculator.model
        original, logits = model.compute_logits, []

        def record(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = original(*args, **kwargs)
            logits.append(result.clone())
            return result

        model.compute_logits = record
        tokens = generate(llm, held_out(len(LENGTHS), LENGTHS), params)
        found = counters(llm)
    return Run(tokens, logits, found["num_accepted_tokens"] / found["num_drafts"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def bf16(folder: Path) -> tuple[Path, Run]:
    target = save_widened(folder / "bf16", fp8=False)
    return target, run(target)


@pytest.fixture(scope="module")
def fp8(folder: Path) -> tuple[Path, Run]:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM computes in FP8 on CPUs with AMX only")
    target = save_widened(folder / "fp8", fp8=True)
    return target, run(target)


def assert_same_drafts(left: Run, right: Run) -> None:
    assert left.tokens == right.tokens
    assert len(left.logits) == len(right.logits) > 10
    for step, (one, other) in enumerate(zip(left.logits, right.logits, strict=True)):
        assert torch.equal(one, other), f"draft logits of call {step} differ"
    assert left.accepted_per_step == right.accepted_per_step


def test_bf16_export_drafts_bit_for_bit(bf16: tuple[Path, Run], folder: Path) -> None:
    target, embedded = bf16
    export_nextn(target, folder / "bf16-nextn")
    assert embedded.accepted_per_step > 0.5, "the widened model is not the trained one"
    assert_same_drafts(embedded, run(target, folder / "bf16-nextn"))


@pytest.mark.slow
def test_fp8_export_drafts_bit_for_bit(fp8: tuple[Path, Run], folder: Path) -> None:
    target, embedded = fp8
    export_nextn(target, folder / "fp8-nextn")
    assert embedded.accepted_per_step > 0.5, "the widened model is not the trained one"
    assert_same_drafts(embedded, run(target, folder / "fp8-nextn"))


@pytest.mark.slow
def test_plain_layer_in_an_fp8_target(
    bf16: tuple[Path, Run], fp8: tuple[Path, Run], folder: Path
) -> None:
    """C38: accepted as in the builds of one precision; none of it is listed."""
    found = run(save_widened(folder / "mixed", fp8=True, mtp_fp8=False))
    assert found.tokens == fp8[1].tokens, "the target is the same"
    for other in (bf16[1], fp8[1]):
        assert found.accepted_per_step == pytest.approx(
            other.accepted_per_step, rel=0.25
        )


@pytest.mark.slow
def test_fp8_folder_beside_a_plain_target(
    bf16: tuple[Path, Run], fp8: tuple[Path, Run], folder: Path
) -> None:
    target, embedded = bf16
    draft = folder / "fp8-nextn-2"
    export_nextn(fp8[0], draft)
    found = run(target, draft)
    assert found.tokens == embedded.tokens, "a drafter does not change the output"
    assert found.accepted_per_step == pytest.approx(
        embedded.accepted_per_step, rel=0.25
    )
    shutil.rmtree(draft)


def save_without(folder: Path, part: str) -> Path:
    """The tiny model without those tensors of its MTP layer that hold ``part``."""
    config = json.loads((MODEL / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = load_file(MODEL / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not (name.startswith(prefix) and part in name)
    }
    return save_model(folder, config, kept)


@pytest.mark.parametrize("part", ["", "mlp.experts", "eh_proj"])
def test_missing_tensors_are_refused_in_the_front_end(
    tmp_path: Path, part: str
) -> None:
    """C36, through the option itself and before any worker exists."""
    from vllm.engine.arg_utils import EngineArgs

    target = save_without(tmp_path, part)
    arguments = EngineArgs(
        model=str(target),
        speculative_config={"method": "mtp_tree"},
        skip_tokenizer_init=True,
    )
    words = rf"\(model.layers.3\) of .* is incomplete: .*{part}"
    with pytest.raises(SettingsError, match=words):
        arguments.create_engine_config()


def test_the_same_model_serves_without_speculation(tmp_path: Path) -> None:
    from vllm import SamplingParams

    target = save_without(tmp_path, "")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with engine(model=str(target), skip_tokenizer_init=True) as llm:
        [tokens] = generate(llm, held_out(1), params)
    assert len(tokens) == 4
