"""Trees under a tight scheduler: same ids, same drafts, no KV block lost.

Every scenario runs on one engine; the reference runs afterwards, so that bfloat16 runs
on GPUs can be held to the margin rule. On a machine with a GPU this file runs with
graphs, async scheduling and the backends below.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import mtp_tree
from tests.e2e.test_structured import ANYTHING
from tests.helpers.engine import engine
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.prompts import held_out
from tests.helpers.scheduling import (
    MAX_MODEL_LEN,
    SETTINGS,
    FirstDraft,
    Scheduled,
    scheduled_engine,
)

Requests = dict[str, tuple[list[int], Any]]
Ids = dict[str, list[int]]

TOKENS = 48 if GPUS else 14
BACKENDS: dict[str, dict[str, Any]] = {"cpu": {}}
if GPUS:
    BACKENDS = {
        "flash_attn_mla": {"attention_backend": "FLASH_ATTN_MLA", "block_size": 64},
        "flash_attn_mla-16": {"attention_backend": "FLASH_ATTN_MLA", "block_size": 16},
        "flashmla": {"attention_backend": "FLASHMLA", "block_size": 64},
        "triton_mla": {"attention_backend": "TRITON_MLA", "block_size": 16},
        "triton_mla-128": {"attention_backend": "TRITON_MLA", "block_size": 128},
    }


def requests(
    lengths: tuple[int, ...], tokens: int = TOKENS, first: int = 0, **extra: Any
) -> Requests:
    """One request per prompt length, greedy and sampled in turn."""
    from vllm import SamplingParams

    prompts = held_out(first + len(lengths))[first:]
    long = 3 * max(held_out(48), key=len)
    found = {}
    for i, length in enumerate(lengths):
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=100 + i,
            max_tokens=tokens,
            ignore_eos=True,
            **extra,
        )
        found[f"r{i}"] = ((prompts[i] + long)[:length], params)
    return found


# --- scenarios: what is served, and what must have happened --------------------------

MIXED = (20, 1, 9, 2, 33)
BLOCK_EDGES = (63, 64, 65)


def chunks(s: Scheduled, budget: int, lengths: tuple[int, ...]) -> tuple[Requests, Ids]:
    """Prompts in chunks of what the budget leaves beside verifying requests."""
    wanted = requests(lengths)
    arrivals = {name: 2 * i for i, name in enumerate(wanted)}
    s.chunks.clear()
    with s.budget(budget):
        found = s.drive(wanted, arrivals)
    assert max(s.chunks) <= budget
    if budget < 10:
        # The whole budget, or what a tree of eight rows leaves of it.
        assert 1 in s.chunks
    return wanted, found


def whole_prompts(s: Scheduled) -> tuple[Requests, Ids]:
    """Long prompts arrive while others verify; chunks end where they like."""
    wanted = requests((*BLOCK_EDGES, 120, 20, 20))
    return wanted, s.drive(wanted, {f"r{i}": 3 * (i % 4) for i in range(len(wanted))})


def prefix_hits(s: Scheduled) -> tuple[Requests, Ids]:
    """Prompts that share cached blocks, in blocks that held NaN before.

    One hit ends on a block edge with another token behind it, one is the whole prompt.
    """
    from vllm import SamplingParams

    block = s.scheduler.block_size
    base = 3 * max(held_out(48), key=len)
    other = held_out(2)[1]
    prefix = base[: max(3, 96 // block) * block]
    prompts = [
        prefix + base[len(prefix) : len(prefix) + 5],
        prefix + other[:7],
        prefix,
        [*prefix[:-1], other[0]],
        prefix + other[:1],
    ]
    s.poison_free_blocks()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    wanted = {f"r{i}": (p, params) for i, p in enumerate(prompts)}
    found: Ids = {}
    s.cached.clear()
    for name, request in wanted.items():
        found |= s.drive({name: request})
    # vLLM computes the last block of a hit again for the drafter.
    hits = [0, *(len(prefix) - d * block for d in (1, 2, 2, 1))]
    assert list(s.cached.values()) == hits
    return wanted, found


def preemption(s: Scheduled) -> tuple[Requests, Ids]:
    """A pool for about two of the requests; steps are in flight when one goes."""
    count = 16 if GPUS else 8
    wanted = requests((33, 20, 40, 9, 28, 33, 17, 25) * (count // 8), tokens=2 * TOKENS)
    longest = max(len(p) for p, _ in wanted.values()) + 2 * TOKENS
    per_request = -(-longest // s.scheduler.block_size) + 1
    before = s.preemptions
    with s.free_blocks(2 * per_request):
        found = s.drive(wanted)
    assert s.preemptions > before, "nothing was preempted, so nothing was tested"
    return wanted, found


def grammars(s: Scheduled) -> tuple[Requests, Ids]:
    """Grammars walk chains beside trees, also of a request that was preempted."""
    from vllm.sampling_params import StructuredOutputsParams

    wanted = requests((33, 20, 9, 28, 40, 17), tokens=2 * TOKENS)
    for name in ("r0", "r1", "r3", "r4"):
        wanted[name][1].structured_outputs = StructuredOutputsParams(regex=ANYTHING)
        wanted[name][1].ignore_eos = False
    longest = 40 + 2 * TOKENS
    before = s.preemptions
    with s.free_blocks(2 * (-(-longest // s.scheduler.block_size) + 1)):
        found = s.drive(wanted)
    assert s.preemptions > before or GPUS
    return wanted, found


def aborts(s: Scheduled) -> tuple[Requests, Ids]:
    """Requests are aborted in their prefill, in a verify pass, and near their end."""
    wanted = requests((33, 20, 65, 9, 28, 33, 17, 25))
    at = {"r0": 1, "r2": 2, "r3": 3, "r5": 5, "r6": 9}
    with s.budget(48):
        found = s.drive(wanted, aborts=at)
    assert not found.keys() & at.keys()
    # The slots that they left serve others.
    again = requests((33, 9, 20), first=2)
    found |= {f"after-{n}": ids for n, ids in s.drive(again).items()}
    return wanted | {f"after-{n}": r for n, r in again.items()}, found


def context_end(s: Scheduled) -> tuple[Requests, Ids]:
    """``max_model_len`` is reached at each place inside a tree."""
    lengths = tuple(MAX_MODEL_LEN - 8 - short for short in range(1, 6))
    wanted = requests(lengths, tokens=64)
    found = s.drive(wanted)
    for name, (prompt, _) in wanted.items():
        assert len(prompt) + len(found[name]) == MAX_MODEL_LEN
    return wanted, found


def with_and_without_drafts(s: Scheduled) -> tuple[Requests, Ids]:
    """Requests that end before their first draft, and prompts whose scores are asked
    for, beside trees.
    """
    wanted = requests((33, 20, 9, 28, 1, 40))
    for name, tokens in (("r1", 1), ("r2", 2), ("r4", 1)):
        prompt, params = wanted[name]
        params = params.clone()
        params.max_tokens = tokens
        wanted[name] = (prompt, params)
    prompt, params = wanted["r5"]
    params = params.clone()
    params.prompt_logprobs = 1
    wanted["r5"] = (prompt, params)
    return wanted, s.drive(wanted, {"r1": 2, "r2": 3, "r4": 4, "r5": 5})


def same_drafts(s: Scheduled) -> tuple[Requests, Ids]:
    """The prompt's draft KV and the first tree, for every chunk size and for a hit.

    Catches: the token behind a chunk taken from the sampler instead of the prompt, and
    draft KV that a hit skips.
    """
    block = s.scheduler.block_size
    wanted = {k: r for k, r in requests((2 * block + 1, 20)).items() if k == "r0"}
    length = len(wanted["r0"][0])
    found: Ids = {}
    expected: FirstDraft | None = None
    for budget in (length, 7, 32, 33, 1, length):
        hit = budget == length and expected is not None
        if not hit:
            s.forget_prefixes()
            s.poison_free_blocks()
        with s.budget(budget), s.first_drafts() as drafts:
            found = s.drive(wanted)
        assert (s.cached["r0"] or 0) == (block if hit else 0)
        draft = drafts["r0", length - 1]
        expected = expected or draft
        draft.assert_equal(expected, f"chunks of {budget}")
    return wanted, found


SCENARIOS: dict[str, Callable[[Scheduled], tuple[Requests, Ids]]] = {
    "chunks-of-1": lambda s: chunks(s, 1, (20, 1, 9)),
    "chunks-of-7": lambda s: chunks(s, 7, MIXED),
    "chunks-of-9": lambda s: chunks(s, 9, MIXED),
    "chunks-of-33": lambda s: chunks(s, 33, (*MIXED, 65, 64)),
    "whole-prompts": whole_prompts,
    "same-drafts": same_drafts,
    "prefix-hits": prefix_hits,
    "preemption": preemption,
    "grammars": grammars,
    "aborts": aborts,
    "context-end": context_end,
    "with-and-without-drafts": with_and_without_drafts,
}


@pytest.fixture(scope="module", params=BACKENDS)
def faults(request: pytest.FixtureRequest) -> dict[str, str]:
    """Scenario -> what was wrong with it, or an empty string."""
    settings = BACKENDS[request.param]
    served: dict[str, tuple[Requests, Ids]] = {}
    found: dict[str, str] = {}
    with scheduled_engine(mtp_tree(3, 4, 7), **settings) as s:
        for name, scenario in SCENARIOS.items():
            s.forget_prefixes()
            try:
                served[name] = scenario(s)
                s.assert_nothing_leaked()
            except AssertionError as error:
                found[name] = f"{error}"
        assert s.accepted() > 50, "too little was accepted to test anything"
    with engine(**SETTINGS) as reference:
        for name, (wanted, ids) in served.items():
            found[name] = "\n".join(compare(reference, wanted, ids))
    return found


def compare(reference: Any, wanted: Requests, found: Ids) -> list[str]:
    """Requests whose ids are not those without speculation, a line each."""
    names = list(found)
    prompts, params = zip(*(wanted[n] for n in names), strict=True)
    inputs = [{"prompt_token_ids": p} for p in prompts]
    outputs = reference.generate(inputs, list(params), use_tqdm=False)
    expected = [list(o.outputs[0].token_ids) for o in outputs]
    ours = [found[n] for n in names]
    if GPUS:
        return unequal_beyond_ties(
            reference, list(prompts), expected, ours, params=list(params)
        )
    return [
        f"{name}: {mine} instead of {theirs}"
        for name, mine, theirs in zip(names, ours, expected, strict=True)
        if mine != theirs
    ]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ids_equal_no_speculation_and_blocks_return(
    scenario: str, faults: dict[str, str]
) -> None:
    assert not faults[scenario], faults[scenario]
