"""Random traffic: every completed request has the ids of no speculation.

``VLLM_MTP_STRESS_REQUESTS`` sets how many requests, ``VLLM_MTP_STRESS_SEED`` the first
round's seed; a failure says how to serve its round again, alone.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import engine
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.scheduling import SETTINGS, Scheduled, scheduled_engine
from tests.helpers.traffic import Round, make_round

REQUESTS = int(os.environ.get("VLLM_MTP_STRESS_REQUESTS", "2000" if GPUS else "40"))
SEED = int(os.environ.get("VLLM_MTP_STRESS_SEED", "4"))
PER_ROUND = 50 if GPUS else 20
BLOCK = 64 if GPUS else 16
SPECULATIVE: dict[str, dict[str, Any]] = {
    "tree": mtp_tree(3, 4, 7),
    "chain": mtp_tree(3, 1, 3),
    "wide": mtp_tree(4, 2, 12),
    "auto": {"method": "mtp_tree", "shape": "auto"},
    "shared": {"method": "mtp_tree", "share_nodes": True},
}
IN_CI = {"tree"}


@contextlib.contextmanager
def mostly_shared(s: Scheduled, seed: int) -> Iterator[None]:
    """Another rung every step, mostly one whose batch shares its nodes."""
    policy, rng = s.scheduler.shape_policy, random.Random(seed)
    rungs = list(range(len(policy.ladder)))
    shared = [rung for rung in rungs if policy.ladder[rung].is_shared]

    def choose(batch: int, context: int) -> int:
        return rng.choice(shared if rng.random() < 0.8 else rungs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "choose", choose)
        yield


def replay(seed: int, count: int) -> str:
    return (
        f"serve this round again: VLLM_MTP_STRESS_SEED={seed} "
        f"VLLM_MTP_STRESS_REQUESTS={count} pytest tests/e2e/test_stress.py"
    )


def serve(s: Scheduled, traffic: Round) -> dict[str, list[int]]:
    """Serve one round with an empty prefix cache; nothing may be left behind."""
    s.forget_prefixes()
    block = s.scheduler.block_size
    # Rows of one tree beyond the last token, and a block that vLLM keeps.
    least = -(-(traffic.num_tokens + 16) // block) + 1
    blocks = least + traffic.spare_tokens // block
    with s.budget(traffic.budget), s.free_blocks(min(blocks, s.free_at_start)):
        found = s.drive(traffic.requests, traffic.arrivals, traffic.aborts)
    s.assert_nothing_leaked()
    missing = traffic.requests.keys() - found.keys() - traffic.aborts.keys()
    assert not missing, f"never finished: {sorted(missing)}"
    return found


def compare(
    reference: Any, traffic: Round, found: dict[str, list[int]]
) -> dict[str, tuple[list[int], list[int]]] | list[str]:
    """What differs from no speculation, beyond ties where those can be."""
    names = list(found)
    prompts = [traffic.requests[n][0] for n in names]
    params = [traffic.requests[n][1] for n in names]
    inputs = [{"prompt_token_ids": p} for p in prompts]
    outputs = reference.generate(inputs, params, use_tqdm=False)
    expected = [list(o.outputs[0].token_ids) for o in outputs]
    ours = [found[n] for n in names]
    if GPUS:
        return unequal_beyond_ties(reference, prompts, expected, ours, params=params)
    pairs = zip(names, ours, expected, strict=True)
    return {name: (a, b) for name, a, b in pairs if a != b}


@pytest.mark.parametrize(
    "name",
    [
        name if GPUS or name in IN_CI else pytest.param(name, marks=pytest.mark.slow)
        for name in SPECULATIVE
    ],
)
def test_random_traffic(name: str) -> None:
    left, rounds = REQUESTS, []
    served: list[tuple[str, Round, dict[str, list[int]]]] = []
    while left > 0:
        count = min(left, PER_ROUND)
        rounds.append((SEED + len(rounds), count))
        left -= count
    with scheduled_engine(SPECULATIVE[name], block_size=BLOCK) as s:
        for seed, count in rounds:
            traffic, how = make_round(seed, count), replay(seed, count)
            forced = (
                mostly_shared(s, seed) if name == "shared" else contextlib.nullcontext()
            )
            try:
                with forced:
                    served.append((how, traffic, serve(s, traffic)))
            except Exception as error:
                pytest.fail(f"{type(error).__name__}: {error}\n{how}")
        assert s.accepted() > 0
        preemptions = s.preemptions
    with engine(**SETTINGS) as reference:
        for how, traffic, found in served:
            wrong = compare(reference, traffic, found)
            assert not wrong, f"{wrong}\n{how}"
    completed = sum(len(found) for _, _, found in served)
    print(f"{completed} of {REQUESTS} requests completed, {preemptions} preemptions")
    assert completed > REQUESTS // 2
    assert preemptions > 0 or REQUESTS < 1000
