"""One test for each refusal in the table of docs/checkpoints.md, after its row."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    INT4_CONFIGS,
    make_config,
    make_model,
    save_model,
    save_nextn,
    to_fp8,
    to_int4,
)
from tests.helpers.draft_models import load_draft, one_rank
from vllm_mtp.checkpoint.folder import INDEX_NAME
from vllm_mtp.checkpoint.validate import validate_draft_checkpoint
from vllm_mtp.config import SettingsError

CONFIG = make_config()
FP8 = CONFIG | {"quantization_config": FP8_CONFIG}
PREFIX = "model.layers.2."


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


def int4_attention(tmp_path, bf16, method, quantization):
    """A 4-bit MTP attention beside a config that may be another's."""
    layer = {k: v for k, v in bf16.items() if k.startswith(PREFIX)}
    tensors = without(bf16, PREFIX) | to_int4(layer, method, "self_attn")
    config = CONFIG | {"quantization_config": quantization}
    return save_model(tmp_path, config, tensors)


@pytest.mark.parametrize("declared", [64, 256])
@pytest.mark.parametrize("method", sorted(INT4_CONFIGS))
def test_int4_group_size(tmp_path, bf16, method, declared):
    """Where the tensor is larger, vLLM's loader takes a part of it without a word."""
    quantization = json.loads(json.dumps(INT4_CONFIGS[method]))
    compressed = method == "compressed-tensors"
    if compressed:
        group = quantization["config_groups"]["group_0"]["weights"]
    else:
        group = quantization
    group["group_size"] = declared
    last = "weight_scale" if compressed else "scales"
    found, needed = [2, 576], [256 // declared, 576]
    if compressed:
        found, needed = found[::-1], needed[::-1]
    name = f"{PREFIX}self_attn.kv_a_proj_with_mqa.{last}"
    words = (f"{name} is {found} and should be {needed}", f"group_size {declared}")
    refused(int4_attention(tmp_path, bf16, method, quantization), None, *words)


@pytest.mark.parametrize(
    ("stored", "declared", "words"),
    [
        ("gptq", "awq", "o_proj.qweight is [32, 256] and should be [256, 32]"),
        ("awq", "gptq", "o_proj.qweight is [256, 32] and should be [32, 256]"),
        ("compressed-tensors", "awq", "stored as compressed-tensors, which quant_met"),
        ("gptq", "compressed-tensors", "stored as awq/gptq, which quant_method 'comp"),
        ("awq", "fp8", "stored as awq/gptq, which quant_method 'fp8' of the config"),
    ],
)
def test_int4_other_method(tmp_path, bf16, stored, declared, words):
    quantization = (INT4_CONFIGS | {"fp8": FP8_CONFIG})[declared]
    refused(int4_attention(tmp_path, bf16, stored, quantization), None, words)


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
