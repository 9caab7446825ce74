"""One test for each row of the table in docs/checkpoints.md, named after the row."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    INT4_CONFIGS,
    make_config,
    make_model,
    quantize,
    save_model,
    save_nextn,
    to_fp8,
    to_int4,
    write_config,
)
from tests.helpers.draft_models import layer_parameters, load_draft, one_rank
from vllm_mtp.checkpoint.export import export_nextn
from vllm_mtp.checkpoint.folder import INDEX_NAME
from vllm_mtp.checkpoint.validate import validate_draft_checkpoint
from vllm_mtp.config import SettingsError

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"
CONFIG = make_config()
FP8 = CONFIG | {"quantization_config": FP8_CONFIG}
PREFIX = "model.layers.2."
BLOCK = f"{PREFIX}mtp_block."
EXPERTS = f"{BLOCK}mlp.experts.routed_experts."


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.fixture(scope="module")
def bf16():
    return make_model(CONFIG)


@pytest.fixture(scope="module")
def fp8():
    return make_model(CONFIG, fp8=True)


@pytest.fixture(scope="module")
def fp8_bf16():
    """An FP8 model whose MTP layer stayed in bfloat16."""
    return make_model(CONFIG, fp8=True, mtp_fp8=False)


def dtypes(model):
    """Dtype of each weight that can be quantised, by module."""
    return {
        name.removeprefix(BLOCK).removesuffix(".weight"): parameter.dtype
        for name, parameter in layer_parameters(model).items()
        if name.startswith(BLOCK)
        and name.endswith(("_proj.weight", "w13_weight", "w2_weight"))
    }


def assert_all(model, dtype):
    found = dtypes(model)
    assert len(found) == 8, found.keys()
    assert set(found.values()) == {dtype}
    own = layer_parameters(model)[f"{PREFIX}eh_proj.weight"]
    assert own.dtype == torch.bfloat16


def assert_holds(model, tensors):
    """The loaded parameters are the stored tensors, joined as vLLM joins them."""
    found = layer_parameters(model)

    def same(parameter, *names, dim=0):
        expected = torch.cat([tensors[PREFIX + name] for name in names], dim)
        assert equal(found[parameter], expected), parameter

    attention = "self_attn."
    for last in ("weight", "weight_scale_inv"):
        if f"{PREFIX}{attention}o_proj.{last}" not in tensors:
            continue
        same(
            f"{BLOCK}{attention}fused_qkv_a_proj.{last}",
            f"{attention}q_a_proj.{last}",
            f"{attention}kv_a_proj_with_mqa.{last}",
        )
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            same(f"{BLOCK}{attention}{name}.{last}", f"{attention}{name}.{last}")
        shared = "mlp.shared_experts."
        same(
            f"{BLOCK}{shared}gate_up_proj.{last}",
            f"{shared}gate_proj.{last}",
            f"{shared}up_proj.{last}",
        )
        for expert in range(CONFIG["n_routed_experts"]):
            stored = f"{PREFIX}mlp.experts.{expert}."
            gate_up = [
                tensors[f"{stored}{part}_proj.{last}"] for part in ("gate", "up")
            ]
            down = tensors[f"{stored}down_proj.{last}"]
            assert equal(found[f"{EXPERTS}w13_{last}"][expert], torch.cat(gate_up))
            assert equal(found[f"{EXPERTS}w2_{last}"][expert], down)
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
        same(f"{PREFIX}{name}.weight", f"{name}.weight")
    for name in ("input_layernorm.weight", "mlp.gate.e_score_correction_bias"):
        same(f"{BLOCK}{name}", name)


def equal(left, right):
    """Equal bit for bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.view(torch.uint8))


def assert_same_parameters(left, right):
    left, right = layer_parameters(left), layer_parameters(right)
    assert left.keys() == right.keys()
    for name, parameter in left.items():
        assert equal(parameter, right[name].contiguous()), name


def assert_shared(model):
    [target] = model.target_stub
    assert model.model.embed_tokens is target.model.embed_tokens
    assert model.model.layers["2"].shared_head.head is target.lm_head


def refused(target, draft, *words, load=True):
    """Refused before loading, and, where vLLM gets that far, while loading."""
    config = json.loads((Path(target) / "config.json").read_text())
    model_config = SimpleNamespace(
        model=str(target),
        hf_config=SimpleNamespace(**config),
        hf_overrides={},
        max_model_len=128,
    )
    with pytest.raises(SettingsError) as caught:
        validate_draft_checkpoint(model_config, draft and str(draft))
    messages = [str(caught.value)]
    if load:
        with pytest.raises(SettingsError) as caught:
            load_draft(target, draft)
        messages.append(str(caught.value))
    for message in messages:
        for word in words:
            assert word in message


# The layer inside the target's checkpoint.


def test_embedded_bf16(tmp_path, bf16):
    model = load_draft(save_model(tmp_path, CONFIG, bf16))
    assert_all(model, torch.bfloat16)
    assert_holds(model, bf16)
    assert_shared(model)


def test_embedded_fp8(tmp_path, fp8):
    model = load_draft(save_model(tmp_path, FP8, fp8))
    assert_all(model, torch.float8_e4m3fn)
    assert_holds(model, fp8)
    assert_shared(model)


def test_embedded_bf16_listed(tmp_path, fp8_bf16):
    names = [
        name.removesuffix(".weight")
        for name, tensor in fp8_bf16.items()
        if name.startswith(PREFIX) and tensor.dim() == 2
    ]
    quantization = FP8_CONFIG | {"modules_to_not_convert": names}
    config = CONFIG | {"quantization_config": quantization}
    model = load_draft(save_model(tmp_path, config, fp8_bf16))
    assert_all(model, torch.bfloat16)
    assert_holds(model, fp8_bf16)


def test_embedded_bf16_pattern(tmp_path, bf16):
    method = INT4_CONFIGS["compressed-tensors"]
    quantization = method | {"ignore": ["lm_head", r"re:.*layers\.2\..*"]}
    config = CONFIG | {"quantization_config": quantization}
    model = load_draft(save_model(tmp_path, config, bf16))
    assert_all(model, torch.bfloat16)
    assert_holds(model, bf16)


def test_embedded_bf16_unlisted(tmp_path, fp8_bf16):
    """C38: vLLM alone fails here on a missing ``weight_scale_inv``."""
    model = load_draft(save_model(tmp_path, FP8, fp8_bf16))
    assert_all(model, torch.bfloat16)
    assert_holds(model, fp8_bf16)


def test_embedded_fp8_listed(tmp_path, fp8):
    names = [
        f"{PREFIX}self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b", "o")
    ] + [f"{PREFIX}self_attn.kv_a_proj_with_mqa", f"{PREFIX}mlp.experts"]
    quantization = FP8_CONFIG | {"modules_to_not_convert": names}
    config = CONFIG | {"quantization_config": quantization}
    model = load_draft(save_model(tmp_path, config, fp8))
    assert_all(model, torch.float8_e4m3fn)
    assert_holds(model, fp8)


def int4_model(tmp_path, bf16, method, part=None):
    """A 4-bit target, its MTP layer plain but for modules named ``part``."""
    tensors = dict(bf16)
    if part is not None:
        layer = {k: v for k, v in bf16.items() if k.startswith(PREFIX)}
        tensors = {k: v for k, v in bf16.items() if not k.startswith(PREFIX)}
        tensors |= to_int4(layer, method, part)
    config = CONFIG | {"quantization_config": INT4_CONFIGS[method]}
    return save_model(tmp_path, config, tensors), tensors


@pytest.fixture
def int4_attention(tmp_path, bf16):
    def check(method, last, joined_dim):
        folder, tensors = int4_model(tmp_path, bf16, method, "self_attn")
        model = load_draft(folder)
        assert_int4_attention(model, tensors, last, joined_dim)
        return model

    return check


def assert_int4_attention(model, tensors, last, joined_dim):
    found = layer_parameters(model)
    stored = f"{PREFIX}self_attn."
    joined = torch.cat(
        [tensors[f"{stored}{n}.{last}"] for n in ("q_a_proj", "kv_a_proj_with_mqa")],
        joined_dim,
    )
    assert equal(found[f"{BLOCK}self_attn.fused_qkv_a_proj.{last}"], joined)
    name = f"self_attn.kv_b_proj.{last}"
    assert equal(found[BLOCK + name], tensors[PREFIX + name])
    assert found[f"{EXPERTS}w13_weight"].dtype == torch.bfloat16


def test_embedded_bf16_awq(tmp_path, bf16):
    """C37's layout: a 4-bit target, the MTP layer kept."""
    folder, _ = int4_model(tmp_path, bf16, "awq")
    model = load_draft(folder)
    assert_all(model, torch.bfloat16)
    assert_holds(model, bf16)


def test_embedded_bf16_gptq(tmp_path, bf16):
    folder, _ = int4_model(tmp_path, bf16, "gptq")
    model = load_draft(folder)
    assert_all(model, torch.bfloat16)
    assert_holds(model, bf16)


def test_embedded_awq(int4_attention):
    int4_attention("awq", "qweight", 1)


def test_embedded_gptq(int4_attention):
    int4_attention("gptq", "qweight", 1)


def test_embedded_compressed(int4_attention):
    int4_attention("compressed-tensors", "weight_packed", 0)


def test_embedded_mixed_fp8(tmp_path, bf16, fp8):
    attention = f"{PREFIX}self_attn."
    mixed = {k: v for k, v in fp8.items() if not k.startswith(attention)}
    mixed |= {k: v for k, v in bf16.items() if k.startswith(attention)}
    found = dtypes(load_draft(save_model(tmp_path, FP8, mixed)))
    for name, dtype in found.items():
        plain = name.startswith("self_attn")
        assert dtype == (torch.bfloat16 if plain else torch.float8_e4m3fn), name


def test_embedded_half_fused(tmp_path, bf16, fp8):
    name = f"{PREFIX}self_attn.q_a_proj.weight"
    mixed = {k: v for k, v in fp8.items() if k != f"{name}_scale_inv"}
    mixed[name] = bf16[name]
    model = load_draft(save_model(tmp_path, FP8, mixed))
    joined = layer_parameters(model)[f"{BLOCK}self_attn.fused_qkv_a_proj.weight"]
    assert equal(joined[:128], bf16[name])
    other = f"{PREFIX}self_attn.kv_a_proj_with_mqa.weight"
    assert equal(joined[128:], dequantized(fp8, other))
    assert dtypes(model)["self_attn.o_proj"] == torch.float8_e4m3fn


def dequantized(tensors, name):
    weight, scale = tensors[name], tensors[f"{name}_scale_inv"]
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight.float() * spread[: weight.shape[0], : weight.shape[1]]).bfloat16()


def test_embedded_fp8_eh_proj(tmp_path, fp8):
    name = f"{PREFIX}eh_proj.weight"
    tensors = dict(fp8)
    tensors[name], tensors[f"{name}_scale_inv"] = quantize(fp8[name])
    model = load_draft(save_model(tmp_path, FP8, tensors))
    assert equal(layer_parameters(model)[name], dequantized(tensors, name))


# A folder of its own.


def test_nextn_bf16(tmp_path, bf16):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_nextn(tmp_path / "n", CONFIG, bf16)
    model = load_draft(target, draft)
    assert_same_parameters(model, load_draft(target))
    assert_shared(model)


def test_nextn_fp8(tmp_path, fp8):
    target = save_model(tmp_path / "m", FP8, fp8)
    draft = save_nextn(tmp_path / "n", FP8, fp8)
    assert_same_parameters(load_draft(target, draft), load_draft(target))


@pytest.mark.parametrize("index", [2, 61])
def test_nextn_kept_index(tmp_path, bf16, index):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_nextn(tmp_path / "n", CONFIG, bf16, index)
    assert_same_parameters(load_draft(target, draft), load_draft(target))


def test_nextn_exported(tmp_path, fp8):
    target = save_model(tmp_path / "m", FP8, fp8)
    export_nextn(target, tmp_path / "n")
    assert_same_parameters(load_draft(target, tmp_path / "n"), load_draft(target))


def test_nextn_fp8_bf16_target(tmp_path, bf16, fp8):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    model = load_draft(target, save_nextn(tmp_path / "n", FP8, fp8))
    assert_all(model, torch.float8_e4m3fn)
    assert_holds(model, fp8)


def test_nextn_bf16_fp8_target(tmp_path, bf16, fp8):
    target = save_model(tmp_path / "m", FP8, fp8)
    model = load_draft(target, save_nextn(tmp_path / "n", CONFIG, bf16))
    assert_all(model, torch.bfloat16)
    assert_holds(model, bf16)


def test_nextn_gptq(tmp_path, bf16):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    layer = {k: v for k, v in bf16.items() if k.startswith(PREFIX)}
    tensors = to_int4(layer, "gptq", "self_attn")
    config = CONFIG | {"quantization_config": INT4_CONFIGS["gptq"]}
    model = load_draft(target, save_nextn(tmp_path / "n", config, tensors))
    assert_int4_attention(model, tensors, "qweight", 1)


def test_nextn_equal_copies(tmp_path, bf16):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_nextn(tmp_path / "n", CONFIG, bf16, own=True)
    model = load_draft(target, draft)
    assert_shared(model)
    assert_same_parameters(model, load_draft(target))


@pytest.mark.parametrize("part", ["embed_tokens", "shared_head.head"])
def test_nextn_own_copies(tmp_path, bf16, part):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    name = f"{PREFIX}{part}.weight"
    tensors = bf16 | {name: bf16[name] + 1}
    draft = save_nextn(tmp_path / "n", CONFIG, tensors, own=True)
    model = load_draft(target, draft)
    [stub] = model.target_stub
    embedding, head = model.model.embed_tokens, model.model.layers["2"].shared_head.head
    kept = {"embed_tokens": embedding, "shared_head.head": head}
    assert equal(kept.pop(part).weight.detach(), tensors[name])
    [shared] = kept.values()
    assert shared in (stub.model.embed_tokens, stub.lm_head)


def test_nextn_bare_target(tmp_path, bf16):
    bare = {k: v for k, v in bf16.items() if not k.startswith(PREFIX)}
    config = CONFIG | {"num_nextn_predict_layers": 0}
    target = save_model(tmp_path / "m", config, bare)
    model = load_draft(target, save_nextn(tmp_path / "n", CONFIG, bf16))
    assert_holds(model, bf16)


def test_checkpoint_as_draft(tmp_path, bf16, fp8, monkeypatch):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_split(tmp_path / "d", fp8)
    from vllm.model_executor.model_loader import default_loader

    read = []
    original = default_loader.filter_safetensors_files_by_weight_name

    def spy(files, is_unused):
        read.extend(original(files, is_unused))
        return original(files, is_unused)

    monkeypatch.setattr(default_loader, "filter_safetensors_files_by_weight_name", spy)
    model = load_draft(target, draft)
    assert_holds(model, fp8)
    assert [Path(name).name for name in read] == ["b.safetensors"]


def save_split(folder, tensors):
    """An FP8 checkpoint with the MTP layer in a file of its own."""
    folder.mkdir()
    for name, is_mtp in (("a", False), ("b", True)):
        part = {k: v for k, v in tensors.items() if k.startswith(PREFIX) is is_mtp}
        save_file(part, folder / f"{name}.safetensors")
    write_config(folder, FP8)
    return folder


# Refusals.


def test_nextn_fp8_float32(tmp_path, bf16, fp8):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_nextn(tmp_path / "n", FP8, fp8)
    with pytest.raises(SettingsError) as caught:
        load_draft(target, draft, dtype="float32")
    message = str(caught.value)
    assert "stored as fp8-block, which vLLM runs with --dtype bfloat16" in message
    assert "not float32" in message


def test_unreadable_form(tmp_path, bf16):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    tensors = {}
    for name, tensor in to_fp8(bf16).items():
        # The same weights with one scale for each tensor.
        is_scale = name.endswith("_scale_inv")
        tensors[name.removesuffix("_inv")] = tensor.max() if is_scale else tensor
    draft = save_nextn(tmp_path / "n", CONFIG, tensors)
    with pytest.raises(SettingsError, match="stored as fp8, but the config there decl"):
        load_draft(target, draft)


def without(tensors, part):
    return {k: v for k, v in tensors.items() if part not in k}


def test_missing_all(tmp_path, bf16):
    target = save_model(tmp_path, CONFIG, without(bf16, PREFIX))
    words = ("(model.layers.2)", "30 of its tensors", f"{PREFIX}enorm.weight")
    refused(target, None, *words)


def test_missing_experts(tmp_path, bf16):
    target = save_model(tmp_path, CONFIG, without(bf16, f"{PREFIX}mlp.experts"))
    refused(target, None, "(model.layers.2)", f"{PREFIX}mlp.experts.{{0..3}}.up_proj")


def test_missing_eh_proj(tmp_path, bf16):
    target = save_model(tmp_path, CONFIG, without(bf16, "eh_proj"))
    refused(target, None, "(model.layers.2)", f"missing: {PREFIX}eh_proj.weight.")


def test_missing_scale(tmp_path, fp8):
    name = f"{PREFIX}self_attn.o_proj.weight_scale_inv"
    target = save_model(tmp_path, FP8, without(fp8, name))
    refused(target, None, "(model.layers.2)", f"missing: {name}.")


@pytest.mark.parametrize(
    "name", ["eh_proj.weight", "hnorm.weight", "self_attn.o_proj.weight"]
)
@pytest.mark.parametrize("config", [CONFIG, FP8], ids=["bf16", "fp8"])
def test_all_zeros(tmp_path, bf16, name, config):
    tensors = to_fp8(bf16) if config is FP8 else dict(bf16)
    tensors[PREFIX + name] = torch.zeros_like(tensors[PREFIX + name])
    target = save_model(tmp_path, config, tensors)
    with pytest.raises(SettingsError, match=f"{name} holds nothing but zeros"):
        load_draft(target)


def test_count_zero(tmp_path, bf16):
    target = save_model(tmp_path, CONFIG | {"num_nextn_predict_layers": 0}, bf16)
    words = ("says 0", "stores 1 (model.layers.2)", '{"num_nextn_predict_layers": 1}')
    refused(target, None, *words, load=False)


def test_count_absent(tmp_path, bf16):
    config = dict(CONFIG)
    del config["num_nextn_predict_layers"]
    target = save_model(tmp_path, config, bf16)
    refused(target, None, "does not say", '{"num_nextn_predict_layers": 1}')


def test_count_disagrees(tmp_path, bf16):
    target = save_model(tmp_path, CONFIG | {"num_nextn_predict_layers": 2}, bf16)
    refused(target, None, "=2 MTP layers", "stores 1 (model.layers.2)")


def test_two_layers(tmp_path):
    config = CONFIG | {"num_nextn_predict_layers": 2}
    target = save_model(tmp_path, config, make_model(CONFIG, mtp_layers=2))
    refused(target, None, "has 2 MTP layers", "vllm-mtp export --layer 2")


def test_other_model(tmp_path, bf16):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    other = make_config(vocab_size=1024, num_attention_heads=4)
    draft = save_nextn(tmp_path / "n", other, make_model(other))
    words = ("vocab_size is 1024 there and 512", "num_attention_heads is 4 there and 2")
    refused(target, draft, *words)


def test_few_positions(tmp_path, bf16):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    config = CONFIG | {"max_position_embeddings": 64}
    draft = save_nextn(tmp_path / "n", config, bf16)
    refused(target, draft, "covers 64 positions", "max_model_len=128")


@pytest.mark.parametrize("separate", [False, True])
def test_truncated_file(tmp_path, bf16, separate):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_nextn(tmp_path / "n", CONFIG, bf16) if separate else None
    name = "nextn.safetensors" if separate else "model-00002-of-00003.safetensors"
    path = (draft or target) / name
    path.write_bytes(path.read_bytes()[:-7])
    # vLLM reads headers of its own before ours where a file is the target's.
    refused(target, draft, str(path), "is truncated", load=separate)


def test_missing_file(tmp_path, bf16):
    target = save_model(tmp_path, CONFIG, bf16)
    (target / "model-00002-of-00003.safetensors").unlink()
    words = (INDEX_NAME, "model-00002-of-00003.safetensors, which is not in the folder")
    refused(target, None, *words)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickle(tmp_path, bf16, name):
    target = save_model(tmp_path / "m", CONFIG, bf16)
    draft = save_nextn(tmp_path / "n", CONFIG, bf16)
    (draft / "nextn.safetensors").rename(draft / name)
    refused(target, draft, name, "a pickle, which can run code")


def test_table_and_tests_agree():
    rows = re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    tests = {name.removeprefix("test_") for name in globals() if name[:5] == "test_"}
    assert len(rows) == len(set(rows)) > 30
    assert set(rows) == tests - {"table_and_tests_agree"}
