"""``"shape": "auto"`` in CUDA graphs: every size, equal or shared, gives the same ids.

A size is used for a few steps and then another, whatever pays. A fault is told with the
passes of its request that lead to it.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.test_ids import sampling
from tests.helpers.engine import WITH_GRAPHS, counters, engine, generate, runner_of
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.prompts import held_out
from vllm_mtp.tuning.run import policy_of

COUNT, TOKENS = 40, 96
LENGTHS = (1, 2, 3, 7, 8, 9, 33, 120)
SETTINGS: dict[str, Any] = {
    "attention_backend": None,
    "dtype": "bfloat16",
    **WITH_GRAPHS,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 30,
}


@dataclass
class Watch:
    """What happened in the passes of a run."""

    graphs: list[bool] = field(default_factory=list)
    """Whether a graph of any query lengths was replayed."""

    kept: set[int] = field(default_factory=set)
    passes: dict[int, list[str]] = field(default_factory=dict)
    """Request -> a line for each of its passes."""


def serve(llm: Any, params: Any, shared: bool) -> tuple[list[list[int]], Watch]:
    """Ids while sizes change, of those that are shared or of the others."""
    runner, policy = runner_of(llm), policy_of(llm)
    manager, verifier = runner.cudagraph_manager, runner.rejection_sampler
    sizes = [i for i, r in enumerate(policy.ladder) if i and r.is_shared == shared]
    watch, steps, prompts = Watch(), [0], held_out(COUNT, LENGTHS)
    run, graph = manager.run_fullgraph, [""]

    def run_fullgraph(desc: Any) -> Any:
        graph[0] = f"graph of {desc.num_reqs} requests, {desc.num_tokens} rows"
        watch.graphs.append(desc.max_query_len is not None)
        return run(desc)

    def observe(batch: Any, _fed: Any, _drawn: Any, num_emitted: Any) -> None:
        starts = batch.cu_num_logits.tolist()
        roots = batch.positions[batch.logits_indices[starts[:-1]]].tolist()
        for row, (req_id, slot) in enumerate(
            zip(batch.req_ids, batch.idx_mapping.tolist(), strict=True)
        ):
            rows = starts[row + 1] - starts[row]
            watch.kept.add(rows - 1)
            request = int(req_id.split("-")[0]) % COUNT
            emits = roots[row] - len(prompts[request]) + 1
            path = runner.tree.path[row, : int(num_emitted[row])].tolist()
            parents = runner.tree.parents[slot, :rows].tolist()
            watch.passes.setdefault(request, []).append(
                f"token {emits}: {rows} of {starts[-1]} rows, {batch.num_reqs} "
                f"requests, parents {parents}, path {path}, {graph[0] or 'no graph'}"
            )
        graph[0] = ""

    def choose(batch: int, context: int) -> int:
        steps[0] += 1
        return sizes[steps[0] // 8 % len(sizes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "run_fullgraph", run_fullgraph)
        patch.setattr(verifier, "observer", observe)
        patch.setattr(policy, "choose", choose)
        ids = generate(llm, prompts, params)
    return ids, watch


def explain(fault: str, watch: Watch) -> str:
    """The fault, and the last passes before it."""
    found = re.match(r"output (\d+), token (\d+)", fault)
    assert found is not None
    output, token = map(int, found.groups())
    lines = [
        line
        for line in watch.passes.get(output, [])
        if int(line.split()[1].rstrip(":")) <= token
    ]
    return "\n  ".join([fault, *lines[-6:]])


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("backend", [None, "FLASHMLA", "TRITON_MLA"])
def test_ids_are_those_without_speculation(backend: str | None, shared: bool) -> None:
    settings = SETTINGS | {"attention_backend": backend}
    runs = {
        "greedy": sampling(COUNT, (0.0,), TOKENS),
        "mixed": sampling(COUNT, (0.0, 0.8), TOKENS),
    }
    found = {}
    with engine({"method": "mtp_tree", "share_nodes": True}, **settings) as llm:
        for name, params in runs.items():
            found[name] = ids, watch = serve(llm, params, shared)
            # Most of the 20 or so steps after the prompts are in, until requests end.
            assert len(watch.graphs) > 8
            assert any(watch.graphs) is shared
            assert len(watch.kept) > 3
        accepted = counters(llm)
        assert accepted["num_accepted_tokens"] > 0.8 * accepted["num_drafts"]
    wrong: list[str] = []
    with engine(**settings) as llm:
        prompts = held_out(COUNT, LENGTHS)
        for name, params in runs.items():
            reference = generate(llm, prompts, params)
            ids, watch = found[name]
            faults = unequal_beyond_ties(llm, prompts, reference, ids, params=params)
            wrong += [f"{name} {explain(fault, watch)}" for fault in faults]
            equal = sum(a == b for a, b in zip(reference, ids, strict=True))
            print(f"\n{backend} {name}: {equal} of {COUNT} equal")
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "TRITON_MLA"])
def test_no_speculation_in_other_batches_differs_by_ties_only(
    backend: str | None,
) -> None:
    """How far the rule itself holds: no trees at all, three requests at a time."""
    settings = SETTINGS | {"attention_backend": backend}
    prompts, params = held_out(COUNT, LENGTHS), sampling(COUNT, (0.0,), TOKENS)
    with engine(**settings) as llm:
        reference = generate(llm, prompts, params)
        ids: list[list[int]] = []
        for first in range(0, COUNT, 3):
            part = slice(first, first + 3)
            ids += generate(llm, prompts[part], params[part])
        faults = unequal_beyond_ties(llm, prompts, reference, ids)
    assert not faults, faults
