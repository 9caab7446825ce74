"""Batches that share their nodes, in CUDA graphs of requests with different rows."""

from typing import Any

import pytest

from tests.e2e.test_ids import sampling
from tests.helpers.engine import counters, engine, generate, runner_of
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.prompts import held_out

COUNT, TOKENS = 40, 96
LENGTHS = (1, 2, 3, 7, 8, 9, 33, 120)
SETTINGS: dict[str, Any] = {
    "attention_backend": None,
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 30,
}


def serve_shared(llm: Any, params: Any) -> tuple[list[list[int]], int, set[int]]:
    """Ids, replays of graphs with different rows, and numbers of nodes kept."""
    from vllm_mtp.auto import sharing

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    policy, manager = scheduler.shape_policy, runner_of(llm).cudagraph_manager
    shared = [i for i, rung in enumerate(policy.ladder) if rung.is_shared]
    replays, kept, steps = [0], [], [0]
    run, keep = manager.run_fullgraph, sharing.keep_best

    def run_fullgraph(desc: Any) -> Any:
        replays[0] += desc.max_query_len is not None
        return run(desc)

    def keep_best(*args: Any) -> Any:
        kept.append(keep(*args))
        return kept[-1]

    def choose(batch: int, context: int) -> int:
        # Each for a while, since drafts and graphs are those of one size.
        steps[0] += 1
        return shared[steps[0] // 8 % len(shared)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "run_fullgraph", run_fullgraph)
        patch.setattr(sharing, "keep_best", keep_best)
        patch.setattr(policy, "choose", choose)
        ids = generate(llm, held_out(COUNT, LENGTHS), params)
    return ids, replays[0], {n for counts in kept for n in counts.tolist()}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "FLASHMLA", "TRITON_MLA"])
def test_ids_are_those_without_speculation(backend: str | None) -> None:
    settings = SETTINGS | {"attention_backend": backend}
    runs = {
        "greedy": sampling(COUNT, (0.0,), TOKENS),
        "mixed": sampling(COUNT, (0.0, 0.8), TOKENS),
    }
    found = {}
    with engine(
        {"method": "mtp_tree", "shape": "auto", "share_nodes": True}, **settings
    ) as llm:
        for name, params in runs.items():
            found[name], replays, kept = serve_shared(llm, params)
            # Most of the 20 or so steps after the prompts are in, until requests end.
            assert replays > 8
            assert {0, 1, 2, 3} < kept
        accepted = counters(llm)
        assert accepted["num_accepted_tokens"] > 0.8 * accepted["num_drafts"]
    with engine(**settings) as llm:
        for name, params in runs.items():
            prompts = held_out(COUNT, LENGTHS)
            reference = generate(llm, prompts, params)
            faults = unequal_beyond_ties(
                llm, prompts, reference, found[name], params=params
            )
            assert not faults, (name, faults)
            equal = sum(a == b for a, b in zip(reference, found[name], strict=True))
            print(f"\n{backend} {name}: {equal} of {COUNT} equal, {replays} replays")
