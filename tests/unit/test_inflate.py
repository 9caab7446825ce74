"""The inflated benchmark model computes what the tiny one does, part by part."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.inflate import TINY, Inflation, Inflator, Space
from benchmarks.serving.cost import count_bytes
from benchmarks.serving.prompts import cut_windows
from benchmarks.serving.report import (
    compare_loads,
    join,
    mean_ratios,
    merge,
    stamp,
    summarize,
)
from benchmarks.serving.setup import CPU_SHAPE
from vllm_mtp.tuning.shapes import Shape

EPS = 1e-6


@pytest.fixture(scope="module")
def inflator() -> Inflator:
    return Inflator(TINY, CPU_SHAPE)


@pytest.fixture(scope="module", autouse=True)
def examples() -> None:
    sys.path.insert(0, str(TINY.parent))


def filled(inflator: Inflator, name: str, *shape: int) -> torch.Tensor:
    """A parameter of vLLM's model; NaN wherever `fill` leaves something out."""
    out = torch.full(shape, torch.nan)
    inflator.fill(name, out)
    assert not out.isnan().any()
    return out


def widen(inflator: Inflator, values: torch.Tensor) -> torch.Tensor:
    """Trained hidden states [rows, size] as they lie in the inflated model."""
    space = inflator.hidden
    wide = torch.randn(len(values), space.width) * 1e-9
    wide[:, : space.live] = space.repeat(values.T).T
    wide[:, inflator.constant] = 1e-4
    return wide


@pytest.mark.parametrize(
    ("size", "width"), [(192, 7168), (64, 1536), (192, 768), (192, 1536), (64, 64)]
)
def test_copies_keep_the_norm(size: int, width: int) -> None:
    """Without the copies a norm would be off by sqrt(width / size): 6.1 for V3."""
    space = Space(size, width)
    x, weight = torch.randn(5, size), torch.rand(size)
    wide, wide_weight = torch.zeros(5, width), torch.full((width,), torch.nan)
    wide[:, : space.live] = space.repeat(x.T).T
    space.fill_norm(wide_weight, weight)
    expected = rms_norm(x, (size,), weight, EPS)
    found = rms_norm(wide, (width,), wide_weight, EPS)
    torch.testing.assert_close(found[:, :size] / space.scales[0], expected)
    torch.testing.assert_close(found[:, : space.live], space.repeat(expected.T).T)


def test_copies_are_exact_in_bfloat16() -> None:
    """A scale that is no power of two would round every weight again."""
    values = torch.randn(192, 8).bfloat16()
    copies = Space(192, 7168).repeat(values).view(-1, 192, 8)
    for copy in copies:
        ratio = copy.float() / values.float()
        assert ratio.unique().numel() == 1


def test_a_width_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="need 4416 channels"):
        Space(192, 500)


def test_attention_is_unchanged(inflator: Inflator) -> None:
    """Heads, ranks and head dimensions grow; YaRN's mscale keeps the softmax."""
    from checkpoint import load_model
    from config import ModelConfig
    from model import Attention, attend_causally, compute_rope

    tiny = load_model(TINY).layers[1].self_attn
    config = dataclasses.replace(
        ModelConfig.from_hf(TINY / "config.json"),
        **{
            name: getattr(CPU_SHAPE, name)
            for name in (
                "hidden_size",
                "num_attention_heads",
                "q_lora_rank",
                "qk_nope_head_dim",
            )
        },
        rope_mscale=inflator.hf_config["rope_scaling"]["mscale"],
    )
    wide = Attention(config)
    layer = next(i for i, trained in inflator.trained.items() if trained == 1)
    prefix = f"model.layers.{layer}.self_attn."
    fused = filled(
        inflator, f"{prefix}fused_qkv_a_proj.weight", 384 + 576, config.hidden_size
    )
    state = {
        "q_a_proj.weight": fused[:384],
        "kv_a_proj_with_mqa.weight": fused[384:],
    }
    for name, value in wide.state_dict().items():
        if name not in state:
            state[name] = filled(inflator, prefix + name, *value.shape)
    wide.load_state_dict(state)

    x = torch.randn(9, inflator.hidden.size)
    rope = compute_rope(config, torch.arange(9))
    with torch.inference_mode():
        expected = tiny(x[None], rope, attend_causally)[0]
        found = wide(widen(inflator, x)[None], rope, attend_causally)[0]
    live = inflator.hidden.live
    copies = inflator.hidden.repeat(expected.T).T
    torch.testing.assert_close(found[:, :live], copies, rtol=1e-4, atol=1e-5)
    assert found[:, live:].abs().max() < 1e-8


@pytest.mark.parametrize("trained", [1, 3])
def test_experts_are_unchanged_and_fillers_add_nothing(
    inflator: Inflator, trained: int
) -> None:
    layer = next(i for i, t in inflator.trained.items() if t == trained)
    prefix = f"model.layers.{layer}.mlp.experts.routed_experts."
    width, hidden = CPU_SHAPE.moe_intermediate_size, CPU_SHAPE.hidden_size
    experts = CPU_SHAPE.n_routed_experts
    w13 = filled(inflator, f"{prefix}w13_weight", experts, 2 * width, hidden)
    w2 = filled(inflator, f"{prefix}w2_weight", experts, hidden, width)
    x = torch.randn(4, inflator.hidden.size)
    live = inflator.hidden.live
    for expert in (0, 7, 8, experts - 1):
        gate, up = linear(widen(inflator, x), w13[expert]).chunk(2, dim=-1)
        found = linear(silu(gate) * up, w2[expert])
        if expert >= 8:
            assert (found[:, : live + 1] == 0).all()
            assert (found[:, live + 1 :] != 0).all()
            continue
        gate, up, down = (
            inflator.tensors[
                f"model.layers.{trained}.mlp.experts.{expert}.{part}_proj.weight"
            ].float()
            for part in ("gate", "up", "down")
        )
        expected = linear(silu(linear(x, gate)) * linear(x, up), down)
        copies = inflator.hidden.repeat(expected.T).T
        torch.testing.assert_close(found[:, :live], copies, rtol=1e-4, atol=1e-5)


def test_unused_vocabulary_never_wins(inflator: Inflator) -> None:
    """Zero rows would have logit 0, above the real logits of an unsure model."""
    hidden, used = CPU_SHAPE.hidden_size, inflator.config["vocab_size"]
    head = filled(inflator, "lm_head.weight", CPU_SHAPE.vocab_size, hidden)
    embedding = filled(
        inflator, "model.embed_tokens.weight", CPU_SHAPE.vocab_size, hidden
    )
    norm = filled(inflator, "model.norm.weight", hidden)
    ids = torch.arange(0, used, 41)
    # A residual stream of 7 is the largest seen; its constant is the embedding's.
    residual = embedding[ids]
    residual[:, : inflator.hidden.live] *= 7 / 0.09
    logits = linear(rms_norm(residual, (hidden,), norm, EPS), head)
    assert logits[:, used:].max() < -100
    trained = inflator.tensors["model.embed_tokens.weight"][ids].float() * 7 / 0.09
    weight = inflator.tensors["model.norm.weight"].float()
    expected = linear(
        rms_norm(trained, (192,), weight, EPS),
        inflator.tensors["lm_head.weight"].float(),
    )
    torch.testing.assert_close(logits[:, :used], expected, rtol=1e-3, atol=1e-3)


def test_mtp_mixing_carries_the_constant_at_position_0(inflator: Inflator) -> None:
    """There the embedding is masked; unused drafts would win the first token."""
    hidden = CPU_SHAPE.hidden_size
    layer = CPU_SHAPE.num_hidden_layers
    mixing = filled(
        inflator, f"model.layers.{layer}.eh_proj.weight", hidden, 2 * hidden
    )
    embeds, states = torch.randn(3, 192), torch.randn(3, 192)
    inputs = torch.cat([widen(inflator, embeds), widen(inflator, states)], dim=-1)
    weight = inflator.tensors["model.layers.3.eh_proj.weight"].float()
    expected = linear(torch.cat([embeds, states], dim=-1), weight)
    found = linear(inputs, mixing)
    live = inflator.hidden.live
    copies = inflator.hidden.repeat(expected.T).T
    torch.testing.assert_close(found[:, :live], copies, rtol=1e-4, atol=1e-4)
    inputs[:, :hidden] = 0
    assert (linear(inputs, mixing)[:, inflator.constant] > 5e-5).all()


def test_a_pass_costs_what_it_should(inflator: Inflator) -> None:
    one, many = (count_bytes(Inflation(), inflator.config, n) for n in (1, 512))
    assert one["target"] >= 8e9
    assert one["mtp"] < 0.25 * one["target"]
    assert many["mtp"] < 0.05 * many["target"]
    assert many["stored"] < 20e9


def test_unknown_parameters_are_refused(inflator: Inflator) -> None:
    with pytest.raises(ValueError, match=re.escape("model.layers.0.bias")):
        inflator.fill("model.layers.0.bias", torch.zeros(1))


def test_prompts_of_all_lengths_end_at_the_same_text() -> None:
    short, whole = (cut_windows(16, length, longest=512) for length in (64, 512))
    assert {len(prompt) for prompt in short} == {64}
    for a, b in zip(short, whole, strict=True):
        assert a[1:] == b[-63:]
    # No two share a cached block.
    assert len({tuple(prompt[:16]) for prompt in [*short, *whole]}) == 32


def test_shapes_and_summary() -> None:
    tree = Shape.parse("tree:3,4,7")
    assert tree.capture_sizes([1, 8]) == [4, 8, 32, 64]
    assert tree.speculative is not None
    assert tree.speculative["num_speculative_tokens"] == 7
    assert Shape.parse("chain:2").capture_sizes([1, 4]) == [1, 3, 4, 12]
    assert not Shape.parse("chain:2:probabilistic").serves(0.0)
    for name in (
        "tree:3,4",
        "chain:0",
        "chain:-1",
        "chain:x",
        "chain:3:other",
        "auto:x",
    ):
        with pytest.raises(ValueError, match="no configuration"):
            Shape.parse(name)
    point = {"temperature": 0.0, "input_len": 1024, "batch": 1}
    rows = [
        point | {"shape": "off", "family": "off", "tok_s": 100.0, "accept_length": 1.0},
        point
        | {"shape": "chain:2", "family": "chain", "tok_s": 190.0, "accept_length": 2.4},
        point
        | {"shape": "chain:3", "family": "chain", "tok_s": 180.0, "accept_length": 2.8},
        point
        | {"shape": "tree:2,2,3", "family": "tree", "tok_s": 1.0, "accept_length": 2.6},
    ]
    newer = [rows[-1] | {"tok_s": 209.0}]
    (line,) = summarize(merge(rows, newer))
    assert line["chain"] == "2"
    assert line["tree_over_chain"] == 1.1
    assert line["tree_over_off"] == 2.09
    auto = point | {"shape": "auto", "family": "auto", "tok_s": 205.0, "chose": [3, 3]}
    elsewhere = {"batch": 8, "tok_s": 400.0}
    others = [row | elsewhere for row in (rows[0], rows[2], auto)]
    loads = compare_loads([*merge(rows, newer), auto, *others])
    assert loads[0] == {
        "batch": 1,
        "input_len": 1024,
        "off": 100.0,
        "chain": 190.0,
        "chain_shape": "chain:2",
        "tree": 209.0,
        "tree_shape": "tree:2,2,3",
        "auto": 205.0,
        "auto_chose": [3, 3],
        # The one chain that was measured at both loads.
        "single": 180.0,
        "single_shape": "chain:3",
        "auto_over_off": 2.05,
        "auto_over_best": 0.981,
        "auto_over_single": 1.139,
    }
    assert mean_ratios(loads)["auto_over_off"] == pytest.approx(1.432, abs=1e-3)


def test_sampled_loads_and_shared_nodes_stand_beside() -> None:
    """Catches: sampled rows among the greedy ones; two kinds of auto taken for one."""
    shared = Shape.parse("auto:shared")
    assert shared.is_auto
    assert shared.speculative is not None
    assert shared.speculative["share_nodes"] is True
    assert shared.capture_sizes([1, 8]) == Shape.parse("auto").capture_sizes([1, 8])
    point = {"input_len": 1024, "batch": 8, "accept_length": 1.0}
    rows = [
        point | {"shape": name, "family": family, "tok_s": rate, "temperature": t}
        for name, family, rates in (
            ("off", "off", (100.0, 90.0)),
            ("tree:6,3,7,1", "tree", (200.0, 150.0)),
            ("auto", "auto", (190.0, 160.0)),
            ("auto:shared", "shared", (210.0, 170.0)),
        )
        for t, rate in zip((0.0, 1.0), rates, strict=True)
    ]
    rows = [row | {"chose": [7, 6]} for row in rows]
    (greedy,) = compare_loads(rows)
    (sampled,) = compare_loads(rows, sampled=True)
    assert "temperature" not in greedy
    assert sampled["temperature"] == 1.0
    assert (greedy["auto"], greedy["shared"]) == (190.0, 210.0)
    assert (greedy["auto_over_best"], greedy["shared_over_best"]) == (0.95, 1.05)
    assert sampled["auto_over_single"] == pytest.approx(160 / 150, abs=1e-3)
    assert mean_ratios([greedy])["shared_over_off"] == 2.1


@pytest.mark.slow
def test_vllm_gives_the_same_ids_logprobs_and_accepted_drafts(tmp_path: Path) -> None:
    """Target and MTP layer inside vLLM; prompts of 1 token draft at position 0."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    from benchmarks.serving import loader
    from tests.helpers.engine import counters, engine
    from tests.helpers.prompts import held_out

    loader.register()
    Inflator(TINY, CPU_SHAPE).write(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    inputs = [{"prompt_token_ids": p} for p in held_out(5, (1, 3, 17, 40, 90))]
    found = []
    for settings in (
        {},
        {"model": str(tmp_path), "load_format": loader.LOAD_FORMAT},
    ):
        spec = {"method": "mtp", "num_speculative_tokens": 3}
        with engine(spec, skip_tokenizer_init=True, **settings) as llm:
            outputs = [o.outputs[0] for o in llm.generate(inputs, params)]
            ids = [list(o.token_ids) for o in outputs]
            logprobs = [
                step[token].logprob
                for o in outputs
                for step, token in zip(o.logprobs, o.token_ids, strict=True)
            ]
            found.append((ids, counters(llm), logprobs))
            del llm
    tiny, inflated = found
    assert inflated[:2] == tiny[:2]
    assert inflated[2] == pytest.approx(tiny[2], abs=1e-4)


def test_rows_of_another_commit_are_named() -> None:
    """The newest record's provenance must not cover what others measured."""

    def record(commit: str, *rows: dict[str, object]) -> dict[str, object]:
        return {
            "command": f"run {commit}",
            "commit": commit,
            "engines": {commit: {"start_s": 1.0}},
            "profile": {},
            "proof": None,
            "measured": list(rows),
            "rows": [],
        }

    def row(shape: str, batch: int, tok_s: float) -> dict[str, object]:
        known = {"family": shape.split(":")[0], "accept_length": 1.0}
        return {
            "shape": shape,
            "temperature": 0.0,
            "input_len": 64,
            "batch": batch,
            "tok_s": tok_s,
            **known,
        }

    old = record("old", row("off", 1, 5.0), row("off", 8, 40.0))
    new = record("new", row("off", 1, 6.0), row("chain:1", 1, 9.0))
    joined = join([old, new])
    assert joined["commit"] == "new"
    assert joined["command"] == "run old && run new"
    named = {"commit": "old", "temperature": 0.0, "input_len": 64, "shapes": ["off"]}
    assert joined["others"] == [named]
    assert [r["off_tok_s"] for r in joined["rows"]] == [6.0, 40.0]
    assert joined["engines"]["old"] == {"commit": "old", "start_s": 1.0}
    assert joined["engines"]["new"] == {"start_s": 1.0}
    assert join([new])["others"] == []
    # A record that was joined keeps what it says when more is added.
    assert join([joined, record("newer")])["others"][1] == named
    assert stamp(joined, "new") is joined
