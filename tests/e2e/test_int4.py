"""C37: 4-bit checkpoints served in float16, with MTP layers good, random and broken.

Linear layers run in 4 bits on the CPU too; routed experts only on a GPU, since vLLM's
CPU kernel for them does not take DeepSeek's routing.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree, sampling
from tests.helpers.engine import WITH_GRAPHS, counters, engine, generate, runner_of
from tests.helpers.int4_tiny import METHODS, save_int4
from tests.helpers.margin import FLOAT16_LOGIT_TOLERANCE, unequal_beyond_ties
from tests.helpers.prompts import held_out
from vllm_mtp import totals

COUNT, TOKENS = 4, 24
PROMPTS = held_out(COUNT, (1, 9, 20, 33))
TEMPERATURES = (0.0, 0.8)
SETTINGS: dict[str, Any] = {"dtype": "float16"}
if GPUS:
    SETTINGS |= {"attention_backend": None, **WITH_GRAPHS}
LINEARS = {
    "awq": "AutoAWQMarlinLinearMethod",
    "gptq": "AutoGPTQLinearMethod",
    "compressed-tensors": "CompressedTensorsLinearMethod",
}
EXPERTS = {
    "awq": "AutoAWQMoEMethod",
    "gptq": "AutoGPTQMoEMethod",
    "compressed-tensors": "CompressedTensorsWNA16MoEMethod",
}


@dataclass
class Run:
    """What one engine with trees said, counted and logged."""

    tokens: list[list[int]]
    accepted: int
    steps: int
    finite: list[bool]
    """Whether the target's logits were, pass by pass."""

    warnings: int
    target: dict[str, str]
    draft: dict[str, str]
    """Module -> its quantisation method."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """vLLM's build for CPUs with AVX2 alone computes nothing in 4 bits."""
    import vllm._custom_ops  # noqa: F401

    if not GPUS and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's build for this CPU has no 4-bit kernel (cpu_gemm_wna16)")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., Run]:
    """Serve a checkpoint with trees, watching acceptance from the first steps on."""
    monkeypatch.setattr(totals, "EVERY", 1)
    monkeypatch.setattr(totals, "READ_EVERY", 4)

    def run(method: str, mtp_int4: bool, spoil: Any = None) -> Run:
        folder = save(tmp_path / "model", method, mtp_int4, spoil)
        params = sampling(COUNT, TEMPERATURES, TOKENS)
        with engine(mtp_tree(3, 4, 7), model=str(folder), **SETTINGS) as llm:
            runner = runner_of(llm)
            runner.totals.watch.min_steps = 10
            original, finite = runner.model.compute_logits, []

            def record(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                finite.append(bool(result.isfinite().all()))
                return result

            monkeypatch.setattr(runner.model, "compute_logits", record)
            monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
            with caplog.at_level(logging.WARNING):
                tokens = generate(llm, PROMPTS, params)
            found = counters(llm)
            target, draft = (methods(m) for m in (runner.model, draft_of(runner)))
        said = {
            id(r) for r in caplog.records if "accepts next to none" in r.getMessage()
        }
        accepted, steps = found["num_accepted_tokens"], found["num_drafts"]
        return Run(tokens, accepted, steps, finite, len(said), target, draft)

    return run


def draft_of(runner: Any) -> Any:
    return runner.speculator.model


def methods(model: Any) -> dict[str, str]:
    return {
        name: type(part.quant_method).__name__
        for name, part in model.named_modules()
        if getattr(part, "quant_method", None) is not None
    }


def save(folder: Path, method: str, mtp_int4: bool = False, spoil: Any = None) -> Path:
    return save_int4(folder, method, mtp_int4=mtp_int4, experts=bool(GPUS), spoil=spoil)


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], list[list[int]]]:
    """Token ids without speculation, by method; the MTP layer plays no part."""

    @functools.cache
    def reference(method: str) -> list[list[int]]:
        folder = save(tmp_path_factory.mktemp(method), method)
        with engine(model=str(folder), **SETTINGS) as llm:
            return generate(llm, PROMPTS, sampling(COUNT, TEMPERATURES, TOKENS))

    return reference


@pytest.fixture
def assert_right(
    tmp_path: Path, reference: Callable[[str], list[list[int]]]
) -> Callable[[Run, str], None]:
    """Ids of no speculation, up to ties, and a token a step or more."""

    def assert_right(found: Run, method: str) -> None:
        expected = reference(method)
        if found.tokens != expected:
            params = sampling(COUNT, TEMPERATURES, TOKENS)
            folder = save(tmp_path / "again", method)
            with engine(model=str(folder), **SETTINGS) as llm:
                faults = unequal_beyond_ties(
                    llm,
                    PROMPTS,
                    expected,
                    found.tokens,
                    FLOAT16_LOGIT_TOLERANCE,
                    params,
                )
            assert faults == []
        assert [len(ids) for ids in found.tokens] == [TOKENS] * COUNT
        # The first token of each request comes from its prefill.
        assert 0 < found.steps <= COUNT * (TOKENS - 1)
        assert len(found.finite) > TOKENS / 4
        assert all(found.finite)

    return assert_right


def slow_but(quick: tuple[Any, ...], cases: list[tuple[Any, ...]]) -> list[Any]:
    """All cases on a GPU; on a CPU the quick ones, the others marked slow."""
    return [
        case if GPUS or case in quick else pytest.param(*case, marks=pytest.mark.slow)
        for case in cases
    ]


GOOD = [(method, mtp_int4) for method in METHODS for mtp_int4 in (False, True)]


@pytest.mark.parametrize(
    ("method", "mtp_int4"),
    slow_but((("awq", False), ("compressed-tensors", True)), GOOD),
)
def test_good_layers_are_accepted(
    method: str, mtp_int4: bool, run: Any, assert_right: Any
) -> None:
    found = run(method, mtp_int4)
    assert_right(found, method)
    assert found.accepted / found.steps > 0.5
    assert found.warnings == 0
    # Proof of use: what was meant to run in 4 bits did.
    assert LINEARS[method] in found.target.values()
    assert (LINEARS[method] in found.draft.values()) is mtp_int4
    assert (EXPERTS[method] in found.target.values()) is bool(GPUS)
    assert (EXPERTS[method] in found.draft.values()) is (bool(GPUS) and mtp_int4)


def spoiler(kind: str, mtp_int4: bool) -> Callable[[str, Tensor], Tensor]:
    """Changes the draft's first layer, or the scales of 4-bit attention."""

    def spoil(name: str, tensor: Tensor) -> Tensor:
        if kind == "random":
            if "eh_proj" not in name:
                return tensor
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(tensor.shape, generator=generator)
            return (noise * 0.05).to(tensor.dtype)
        scale = "o_proj.scales", "o_proj.weight_scale"
        if name.endswith(scale if mtp_int4 else "eh_proj.weight"):
            return torch.full_like(tensor, float(kind))
        return tensor

    return spoil


BROKEN = [
    (method, mtp_int4, kind)
    for method in METHODS
    for mtp_int4 in (False, True)
    for kind in ("random", "nan", "inf")
]
QUICK = (("awq", False, "random"), ("awq", True, "nan"), ("awq", False, "inf"))


@pytest.mark.parametrize(("method", "mtp_int4", "kind"), slow_but(QUICK, BROKEN))
def test_broken_layers_cost_no_token(
    method: str, mtp_int4: bool, kind: str, run: Any, assert_right: Any
) -> None:
    found = run(method, mtp_int4, spoiler(kind, mtp_int4))
    assert_right(found, method)
    if kind == "random":
        assert found.accepted / found.steps < 0.5
        return
    assert found.accepted == 0
    assert found.steps == COUNT * (TOKENS - 1)
    assert found.warnings == 1
