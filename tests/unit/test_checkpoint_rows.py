"""One test for each row of the table in docs/checkpoints.md, named after the row.

The rows that are refused are in test_checkpoint_refusals.py.
"""

import re
from pathlib import Path

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
    to_int4,
    write_config,
)
from tests.helpers.draft_models import (
    assert_holds,
    assert_same_parameters,
    dtypes,
    equal,
    layer_parameters,
    load_draft,
    one_rank,
)
from vllm_mtp.checkpoint.export import export_nextn

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"
MODULES = ("rows", "refusals")
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


def assert_all(model, dtype):
    found = dtypes(model)
    assert len(found) == 8, found.keys()
    assert set(found.values()) == {dtype}
    own = layer_parameters(model)[f"{PREFIX}eh_proj.weight"]
    assert own.dtype == torch.bfloat16


def assert_shared(model):
    [target] = model.target_stub
    assert model.model.embed_tokens is target.model.embed_tokens
    assert model.model.layers["2"].shared_head.head is target.lm_head


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


LISTS = {
    "awq": {"modules_to_not_convert": [PREFIX]},
    "gptq": {"modules_in_block_to_quantize": ["mlp.gate_proj"]},
    "gptq-rules": {"dynamic": {r"-:.*layers\.2\..*": {}}},
    "compressed-tensors": {"ignore": ["lm_head", r"re:.*layers\.2\..*"]},
}


@pytest.mark.parametrize("case", list(LISTS))
def test_embedded_int4_listed(tmp_path, bf16, case):
    """Built plain for the list's sake, the loader ended in a bare KeyError."""
    method = case.removesuffix("-rules")
    layer = {k: v for k, v in bf16.items() if k.startswith(PREFIX)}
    rest = {k: v for k, v in bf16.items() if not k.startswith(PREFIX)}
    tensors = rest | to_int4(layer, method, "self_attn")
    quantization = INT4_CONFIGS[method] | LISTS[case]
    folder = save_model(
        tmp_path, CONFIG | {"quantization_config": quantization}, tensors
    )
    compressed = method == "compressed-tensors"
    last, joined_dim = ("weight_packed", 0) if compressed else ("qweight", 1)
    assert_int4_attention(load_draft(folder), tensors, last, joined_dim)


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


def test_table_and_tests_agree():
    rows = re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    files = [Path(__file__).with_name(f"test_checkpoint_{n}.py") for n in MODULES]
    text = "".join(path.read_text() for path in files)
    tests = set(re.findall(r"^def test_(\w+)", text, re.MULTILINE))
    assert len(rows) == len(set(rows)) > 30
    assert set(rows) == tests - {"table_and_tests_agree"}
