"""The counters, counted again by hand from a trace of every pass.

Requests stop at a token, reach ``max_model_len``, are aborted with a pass in flight,
and are preempted by a KV pool that is too small for all of them.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_deepseek import variants
from tests.helpers.engine import MODEL, engine
from tests.helpers.prompts import held_out
from vllm_mtp.config import TreeShape
from vllm_mtp.trace.load import load_trace
from vllm_mtp.trace.schema import Step
from vllm_mtp.trace.stats import summarize

FULL = os.environ.get("VLLM_MTP_FULL_TESTS")
SHAPE = TreeShape()
LENGTH = 64
BLOCKS = 11
"""Blocks of 16 tokens; four requests of the longest kind need 16."""

MODELS: dict[str, Callable[[Path], Path]] = {
    "trained": lambda folder: MODEL,
    "m0": variants.write_m0,
    "m1": variants.write_m1,
}


@dataclass(frozen=True)
class Record:
    """What one engine did, in which scenario, and all passes of it."""

    model: str
    counts: dict[str, Counter[str]]
    outputs: dict[str, dict[str, list[int]]]
    prompts: dict[str, int]
    steps: list[Step]

    def counted(self, scenario: str) -> tuple[list[Step], int]:
        """Drafted steps whose tokens were received, and the tokens without drafts.

        A pass that was in flight when its request ended or was preempted was for
        nothing: its tokens lie behind the end, or other passes made them again.
        """
        found, without = [], 0
        for request, output in self.outputs[scenario].items():
            start = self.prompts[request]
            kept: list[Step] = []
            for step in self.steps:
                # vLLM appends a random part to ids inside the engine.
                if step.request.rsplit("-", 1)[0] != request or not step.num_nodes:
                    continue
                while kept and kept[-1].position + len(kept[-1].path) > step.position:
                    kept.pop()
                kept.append(step)
            # A root before the last token received.
            kept = [step for step in kept if step.position < start + len(output) - 1]
            covered = 0
            for step in kept:
                first = step.position + 1 - start
                received = output[first : first + len(step.path)]
                assert list(step.emitted[: len(received)]) == received
                covered += len(received)
            found += kept
            without += len(output) - covered
        return found, without


def read_counts(llm: Any) -> Counter[str]:
    """Every counter of speculation by name and label, zeros left out."""
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if not name.startswith(("spec_decode", "mtp_tree", "num_preemptions")):
            continue
        own = {k: v for k, v in metric.labels.items() if k in ("reason", "nodes")}
        for position, value in enumerate(getattr(metric, "values", ())):
            found[f"{name}/{position}"] += value
        if hasattr(metric, "value"):
            found["/".join([name, *own.values()])] += metric.value
    return found


def run(
    llm: Any,
    name: str,
    prompts: list[list[int]],
    params: list[Any],
    abort_after: int = 0,
) -> dict[str, list[int]]:
    """Serve the prompts together; abort every second one after so many passes."""
    core = llm.llm_engine
    ids = [f"{name}{i}" for i in range(len(prompts))]
    outputs: dict[str, list[int]] = {request: [] for request in ids}
    for request, prompt, param in zip(ids, prompts, params, strict=True):
        core.add_request(request, {"prompt_token_ids": prompt}, param)
    passes = 0
    while core.has_unfinished_requests():
        for output in core.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        passes += 1
        if passes == abort_after:
            core.abort_request(ids[::2])
    return outputs


@pytest.fixture(scope="module", params=MODELS)
def record(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Record:
    """All scenarios on one engine per model."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](folder / "model")
    trace = {"path": str(folder / "t.jsonl"), "max_requests": 64, "text": False}
    settings = {"model": str(model), "max_model_len": LENGTH, "seed": 0}
    counts, outputs, lengths = {}, {}, {}
    with engine(
        {"method": "mtp_tree", "shape": "fixed", "trace": trace},
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False,
        **settings,
    ) as llm:

        def play(name: str, prompts: Any, params: Any, **more: Any) -> None:
            before = read_counts(llm)
            outputs[name] = run(llm, name, prompts, params, **more)
            counts[name] = Counter(read_counts(llm))
            counts[name].subtract(before)
            lengths.update(
                {f"{name}{i}": len(prompt) for i, prompt in enumerate(prompts)}
            )

        short = held_out(4, (9, 17, 24, 12))
        greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        warm = SamplingParams(temperature=1, seed=3, max_tokens=9, ignore_eos=True)
        play("limits", short, [greedy, warm, greedy, warm])
        ids = outputs["limits"]["limits0"][5], outputs["limits"]["limits2"][9]
        stops = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=list(ids))
        play("stops", short[::2], [stops] * 2)
        play("aborts", short, [greedy] * 4, abort_after=4)
        if request.param == "trained":
            lower = StructuredOutputsParams(regex="[a-z ]{30}")
            chain = SamplingParams(
                temperature=0, max_tokens=10, structured_outputs=lower
            )
            play("chains", short[:3], [chain, greedy, chain])
        if request.param == "trained" or FULL:
            endless = SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)
            play("preemption", held_out(4, (40, 38, 44, 36)), [endless] * 4)
    loaded = load_trace(folder / "t.jsonl")
    assert loaded.dropped == 0
    return Record(request.param, counts, outputs, lengths, list(loaded.steps))


SCENARIOS = ("limits", "stops", "aborts", "chains", "preemption")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_counters_are_those_of_the_trace(record: Record, scenario: str) -> None:
    if scenario not in record.counts:
        pytest.skip("the trained model alone, or with make test-all")
    counts = record.counts[scenario]
    steps, without = record.counted(scenario)
    by_hand = summarize(steps)
    drafts = counts["spec_decode_num_drafts"]
    accepted = counts["spec_decode_num_accepted_tokens"]
    assert drafts == by_hand.drafted_steps > 0
    assert accepted == by_hand.accepted
    for depth, number in enumerate(by_hand.accepted_per_depth):
        assert counts[f"spec_decode_num_accepted_tokens_per_pos/{depth}"] == number
    emitted = sum(len(step.path) for step in steps)
    assert 1 + Fraction(accepted, drafts) == Fraction(emitted, drafts)
    assert by_hand.mean_accept_length == emitted / drafts
    assert counts["mtp_tree_nodes_verified"] == by_hand.nodes
    if scenario != "chains":
        assert counts["spec_decode_num_draft_tokens"] == by_hand.nodes
        drafted = SHAPE.num_candidates * (drafts + without)
        assert counts["mtp_tree_nodes_drafted"] == drafted
    assert sum(n for k, n in counts.items() if "without_drafts" in k) == without


def test_chains_are_told_from_trees(record: Record) -> None:
    """Two chains, cut further by their grammar, and a tree in one batch."""
    if "chains" not in record.counts:
        pytest.skip("the trained model alone")
    counts, (steps, without) = record.counts["chains"], record.counted("chains")
    trees = [step for step in steps if step.request.startswith("chains1")]
    chains = [step for step in steps if not step.request.startswith("chains1")]
    assert {step.num_nodes for step in trees} == {SHAPE.num_nodes}
    assert 0 < max(step.num_nodes for step in chains) <= SHAPE.num_steps
    # vLLM counts the rows that pad a chain too.
    assert counts["spec_decode_num_draft_tokens"] > counts["mtp_tree_nodes_verified"]
    drafted = SHAPE.num_candidates * (len(trees) + 1)
    drafted += SHAPE.num_steps * (len(chains) + without - 1)
    assert counts["mtp_tree_nodes_drafted"] == drafted


def test_reasons_for_steps_without_drafts(record: Record) -> None:
    name = "mtp_tree_steps_without_drafts"
    for scenario, found in record.counts.items():
        counts = +found
        reasons = {k.split("/")[1]: n for k, n in counts.items() if name in k}
        # A preempted request is read again.
        read = len(record.outputs[scenario]) + counts["num_preemptions"]
        assert reasons.pop("prefill") == read, scenario
        own = {"preemption": {"max_model_len"}, "chains": {"grammar"}}
        assert reasons.keys() <= own.get(scenario, set()), scenario


def test_the_scenarios_are_what_they_say(record: Record) -> None:
    for scenario, outputs in record.outputs.items():
        lengths = [len(output) for output in outputs.values()]
        if scenario == "aborts":
            assert min(lengths[::2]) < 14 == max(lengths[1::2])
        elif scenario == "stops":
            assert max(lengths) < 24
        elif scenario == "preemption":
            ends = [record.prompts[r] + len(o) for r, o in outputs.items()]
            assert ends == [LENGTH] * 4
            assert record.counts[scenario]["num_preemptions"] > 0


def test_the_models_are_what_they_say(record: Record) -> None:
    counts = record.counts["stops"]
    accepted, drafts = (
        counts[f"spec_decode_num_{name}"] for name in ("accepted_tokens", "drafts")
    )
    low, high = {"m0": (0, 0.2), "trained": (0.8, 2.9), "m1": (2.9, 3)}[record.model]
    assert low <= accepted / drafts <= high


def test_widths(record: Record) -> None:
    for scenario, counts in record.counts.items():
        widths = {k.split("/")[1] for k, n in counts.items() if "passes/" in k and n}
        cut = {str(n) for n in range(SHAPE.num_nodes + 1)}
        assert str(SHAPE.num_nodes) in widths
        may_cut = scenario in ("preemption", "chains")
        assert widths <= (cut if may_cut else {str(SHAPE.num_nodes)})
