"""Tensor and expert parallelism: ids of one rank without speculation; ranks agree.

``pytest tests/e2e/test_parallel.py`` on a machine with two GPUs; graphs and vLLM's
custom all-reduce are on there. Without GPUs two CPU ranks run a short version.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree, sampling
from tests.helpers.engine import MODEL, WITH_GRAPHS, counters, engine, generate
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.prompts import held_out
from tests.helpers.rank_hashes import WORKER_EXTENSION
from vllm_mtp.tuning.run import policy_of

LENGTHS = (1, 2, 7, 9, 33, 64, 65, 120)
COUNT = 16 if GPUS else 3
TOKENS = 128 if GPUS else 8
STEPS = 2000 if GPUS else 8
"""Steps over which ranks are compared at least."""

SETTINGS: dict[str, Any] = {}
if GPUS:
    SETTINGS = {
        "attention_backend": None,
        "dtype": "bfloat16",
        **WITH_GRAPHS,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 256 << 20,
    }
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": WORKER_EXTENSION,
}

pytestmark = [pytest.mark.multi_gpu if GPUS else pytest.mark.slow]


@pytest.fixture(autouse=True)
def _two_ranks_on_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU ranks want a NUMA node each, unless they bind no threads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def near_ties(target: Path) -> str:
    """The tiny model with every output row twice, a rounding apart."""
    shutil.copytree(MODEL, target)
    tensors = load_file(target / "model.safetensors")
    name = "lm_head.weight"
    head = tensors[name]
    twins = head[0::2].clone()
    # One bit of the last place, in one of sixteen entries.
    twins[:, ::16] = torch.nextafter(twins[:, ::16], torch.zeros(1, dtype=twins.dtype))
    head[1::2] = twins
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def share_nodes(llm: Any) -> None:
    """Let every step of an engine with ``"shape": "auto"`` share its nodes."""
    policy = policy_of(llm)
    shared = [i for i, rung in enumerate(policy.ladder) if rung.is_shared]
    policy.choose = lambda batch, context: shared[1]


def serve(
    prompts: list[list[int]], shares: bool = False, **settings: Any
) -> tuple[Any, list[list[str]]]:
    """Ids, and the hashes of both ranks over at least ``STEPS`` steps."""
    params = sampling(COUNT, (0.0, 0.8), TOKENS)
    config = (
        {"method": "mtp_tree", "share_nodes": True} if shares else mtp_tree(3, 4, 7)
    )
    with engine(config, **{**SETTINGS, **TWO_RANKS, **settings}) as llm:
        if shares:
            share_nodes(llm)
        llm.collective_rpc("watch_trees")
        ids = generate(llm, prompts, params)
        hashes = llm.collective_rpc("step_hashes")
        while len(hashes[0]) < 2 * STEPS:
            generate(llm, prompts, sampling(COUNT, (0.0, 0.8, 1.3), 3 * TOKENS))
            hashes = llm.collective_rpc("step_hashes")
        assert counters(llm)["num_accepted_tokens"] > COUNT
    return ids, hashes


def assert_ranks_agree(hashes: list[list[str]]) -> None:
    first, second = hashes
    assert len(first) == len(second) >= 2 * STEPS
    apart = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert not apart, f"ranks differ first at {apart[0]} of {len(first)} records"


def assert_same_ids(
    prompts: list[list[int]], ids: list[list[int]], **settings: Any
) -> None:
    params = sampling(COUNT, (0.0, 0.8), TOKENS)
    with engine(**{**SETTINGS, **settings}) as llm:
        expected = generate(llm, prompts, params)
        faults = unequal_beyond_ties(llm, prompts, expected, ids, params=params)
    assert not faults, faults
    if not GPUS:
        assert ids == expected


def test_two_ranks_give_the_ids_of_one() -> None:
    prompts = held_out(COUNT, LENGTHS)
    ids, hashes = serve(prompts)
    assert_ranks_agree(hashes)
    assert_same_ids(prompts, ids)


@pytest.mark.parametrize("shares", [False, True])
def test_ranks_agree_on_near_ties(tmp_path: Path, shares: bool) -> None:
    """Catches: ranks that decide on logits of their own, rounded in another order."""
    prompts = held_out(COUNT, LENGTHS)
    _, hashes = serve(prompts, shares, model=near_ties(tmp_path / "model"))
    assert_ranks_agree(hashes)


@pytest.mark.skipif(GPUS < 2, reason="expert parallelism needs two GPUs")
def test_expert_parallel() -> None:
    prompts = held_out(COUNT, LENGTHS)
    ids, hashes = serve(prompts, enable_expert_parallel=True)
    assert_ranks_agree(hashes)
    assert_same_ids(prompts, ids)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ray_executor() -> None:
    pytest.importorskip("ray")
    prompts = held_out(COUNT, LENGTHS)
    settings = {**TWO_RANKS, "distributed_executor_backend": "ray"}
    with engine(mtp_tree(3, 4, 7), **{**SETTINGS, **settings}) as llm:
        ids = generate(llm, prompts, sampling(COUNT, (0.0, 0.8), TOKENS))
    assert_same_ids(prompts, ids)
