"""MTP layers: complete ones pass, and what is missing or does not fit is named."""

from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import (
    make_config,
    make_layer,
    make_model,
    quantize,
    save_model,
    save_nextn,
    to_fp8,
)
from vllm_mtp.checkpoint.folder import open_checkpoint
from vllm_mtp.checkpoint.layer import block_size, examine_layer
from vllm_mtp.checkpoint.layout import (
    find_mtp_layers,
    required_tensors,
    split_layer_name,
    summarize_names,
)
from vllm_mtp.checkpoint.plan import plan_load
from vllm_mtp.checkpoint.precision import Storage
from vllm_mtp.checkpoint.safetensors_file import CheckpointError, TensorEntry

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.uint8: "U8",
}
CONFIG = make_config()
ATTENTION_INPUTS = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")


def entries(tensors):
    """Header entries of tensors by relative name, without a file."""
    return {
        split_layer_name(name)[1]: TensorEntry(
            name, DTYPES[tensor.dtype], tuple(tensor.shape), Path("x"), 0, 0
        )
        for name, tensor in tensors.items()
    }


def examine(tensors, config=CONFIG):
    return examine_layer(Path("folder"), 2, entries(tensors), config)


@pytest.fixture
def layer():
    return make_layer(CONFIG, 2, is_mtp=True)


@pytest.fixture
def fp8_layer(layer):
    return to_fp8(layer)


def drop(tensors, part):
    return {name: value for name, value in tensors.items() if part not in name}


def quantize_awq(tensors, part="proj"):
    """Tensors with linear weights as AWQ stores them; values do not matter here."""
    result = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if part not in name or "eh_proj" in name:
            result[name] = tensor
            continue
        rows, columns = tensor.shape
        result[f"{module}.qweight"] = torch.zeros(columns, rows // 8).int()
        result[f"{module}.qzeros"] = torch.zeros(columns // 64, rows // 8).int()
        result[f"{module}.scales"] = torch.zeros(columns // 64, rows).half()
    return result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None},
        {"n_routed_experts": None},
        {"topk_method": "greedy"},
        {"n_shared_experts": 2},
    ],
    ids=["deepseek-v3", "no-q-lora", "dense", "no-bias", "two-shared-experts"],
)
def test_required_names_and_shapes(changes):
    """The list, against tensors made by other code."""
    config = make_config(**changes)
    dense = {"first_k_dense_replace": 9} if "n_routed_experts" in changes else {}
    made = make_layer(config | dense, 2, is_mtp=not dense)
    if dense:
        whole = make_layer(CONFIG, 2, is_mtp=True)
        extra = ("enorm", "hnorm", "eh_proj", "shared_head")
        made |= {k: v for k, v in whole.items() if any(part in k for part in extra)}
    if changes.get("topk_method") == "greedy":
        made = drop(made, "e_score_correction_bias")
    needed = required_tensors(config)
    assert {name: spec.shape for name, spec in needed.items()} == {
        split_layer_name(name)[1]: tuple(tensor.shape) for name, tensor in made.items()
    }
    examine(made, config).check_complete()


def test_complete_layers(layer, fp8_layer):
    plain, fp8 = examine(layer), examine(fp8_layer)
    for found in (plain, fp8):
        found.check_complete()
        assert not found.unexpected
    assert plain.precision == "bfloat16"
    assert fp8.precision == "fp8-block"
    assert fp8.storages["eh_proj"] is Storage.PLAIN


@pytest.mark.parametrize(
    ("part", "count", "words"),
    [
        ("eh_proj", 1, "model.layers.2.eh_proj.weight"),
        (".experts.", 12, "model.layers.2.mlp.experts.{0..3}.gate_proj.weight"),
        ("experts.2.up_proj", 1, "model.layers.2.mlp.experts.2.up_proj.weight"),
        ("e_score_correction_bias", 1, "model.layers.2.mlp.gate.e_score_correction"),
        ("shared_head.norm", 1, "model.layers.2.shared_head.norm.weight"),
        ("model", 30, "and 15 more"),
    ],
    ids=["eh_proj", "experts", "one-expert", "bias", "norm", "all"],
)
def test_missing_tensors_are_named_with_the_layer_index(layer, part, count, words):
    with pytest.raises(CheckpointError) as caught:
        examine(drop(layer, part)).check_complete()
    message = str(caught.value)
    assert "the MTP layer (model.layers.2) of folder is incomplete" in message
    assert f"{count} of its tensors are missing" in message
    assert words in message


def test_missing_scale(fp8_layer):
    found = examine(drop(fp8_layer, "o_proj.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=r"2.self_attn.o_proj.weight_scale_inv"):
        found.check_complete()


def test_wrong_shape_is_told_with_both(layer):
    layer["model.layers.2.self_attn.kv_b_proj.weight"] = torch.zeros(100, 512)
    with pytest.raises(
        CheckpointError, match=r"kv_b_proj.weight is \[100, 512\] and should be \[384"
    ):
        examine(layer).check_complete()


def test_wrong_shape_of_a_norm(layer):
    layer["model.layers.2.enorm.weight"] = torch.zeros(100)
    with pytest.raises(CheckpointError, match=r"enorm.weight is \[100\] and should"):
        examine(layer).check_complete()


def test_many_faults_are_counted(layer):
    wrong = {
        name: torch.zeros(3) if "norm" in name else tensor
        for name, tensor in layer.items()
    }
    with pytest.raises(CheckpointError, match="; and 3 more"):
        examine(wrong).check_complete()


def test_scales_of_other_blocks(fp8_layer):
    name = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    fp8_layer[name] = torch.ones(4, 4)
    with pytest.raises(CheckpointError, match=r"\[2, 2\] \(blocks of 128x128\)"):
        examine(fp8_layer).check_complete()


def test_unknown_dtype_of_a_linear(layer):
    layer["model.layers.2.eh_proj.weight"] = torch.zeros(256, 512).int()
    with pytest.raises(CheckpointError, match="stored as I32, which is not known"):
        examine(layer).check_complete()


def test_quantised_norm(layer):
    layer["model.layers.2.hnorm.weight"] = torch.zeros(256, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"hnorm.weight is stored as I8"):
        examine(layer).check_complete()


def test_unexpected_tensors_are_kept_apart(layer):
    layer["model.layers.2.adapter.weight"] = torch.zeros(3)
    layer["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    layer["model.layers.2.self_attn.k_scale"] = torch.ones(1)
    found = examine(layer)
    found.check_complete()
    assert found.unexpected == ("adapter.weight",)
    assert "adapter.weight" in plan_load(found, {}, is_separate=False).skipped


@pytest.mark.parametrize(
    ("value", "block"),
    [
        ([64, 128], (64, 128)),
        (None, (128, 128)),
        ([128], (128, 128)),
        ([0, 128], (128, 128)),
        (["a", 1], (128, 128)),
    ],
)
def test_block_size(value, block):
    assert block_size({"weight_block_size": value}) == block


class TestPlan:
    def test_plain(self, layer):
        plan = plan_load(examine(layer), {}, is_separate=False)
        assert not plan.quantized
        assert not plan.dequantized
        assert plan.storage is None

    def test_fp8(self, fp8_layer):
        plan = plan_load(examine(fp8_layer), {}, is_separate=False)
        assert set(plan.quantized.values()) == {Storage.FP8_BLOCK}
        assert plan.is_quantized("self_attn.fused_qkv_a_proj")
        assert plan.is_quantized("mlp.experts")
        assert plan.is_quantized("mlp.experts.routed_experts")
        assert not plan.is_quantized("eh_proj")
        assert not plan.is_quantized("mlp.gate")
        assert not plan.dequantized

    def test_fp8_experts_and_plain_attention(self, layer, fp8_layer):
        mixed = fp8_layer | {k: v for k, v in layer.items() if "self_attn" in k}
        mixed = {
            k: v for k, v in mixed.items() if not ("self_attn" in k and "scale" in k)
        }
        found = examine(mixed)
        assert found.precision == "mixed: fp8-block (15), bfloat16 (5)"
        plan = plan_load(found, {}, is_separate=False)
        assert not plan.is_quantized("self_attn.o_proj")
        assert plan.is_quantized("mlp.experts")

    def test_one_half_of_a_joined_module_is_dequantised(self, layer, fp8_layer):
        """vLLM joins q_a_proj and kv_a_proj_with_mqa into one weight of one dtype."""
        name = "model.layers.2.self_attn.q_a_proj.weight"
        mixed = drop(fp8_layer, f"{name}_scale_inv") | {name: layer[name]}
        plan = plan_load(examine(mixed), {}, is_separate=False)
        assert plan.dequantized == {"self_attn.kv_a_proj_with_mqa"}
        assert not plan.is_quantized("self_attn.fused_qkv_a_proj")
        assert "1 modules dequantised while loading" in plan.describe()

    def test_one_plain_expert_makes_all_plain(self, layer, fp8_layer):
        name = "model.layers.2.mlp.experts.1.up_proj.weight"
        mixed = drop(fp8_layer, f"{name}_scale_inv") | {name: layer[name]}
        plan = plan_load(examine(mixed), {}, is_separate=False)
        assert len(plan.dequantized) == 11
        assert not plan.is_quantized("mlp.experts")

    def test_fp8_eh_proj_is_dequantised(self, fp8_layer):
        name = "model.layers.2.eh_proj.weight"
        fp8_layer[name], fp8_layer[f"{name}_scale_inv"] = quantize(fp8_layer[name])
        plan = plan_load(examine(fp8_layer), {}, is_separate=False)
        assert plan.dequantized == {"eh_proj"}

    def test_awq(self, layer):
        found = examine(quantize_awq(layer))
        found.check_complete()
        assert found.precision == "awq/gptq"
        plan = plan_load(found, {}, is_separate=False)
        assert plan.storage is Storage.AWQ_GPTQ
        assert not plan.is_quantized("eh_proj")

    def test_awq_that_misses_its_zeros(self, layer):
        found = examine(drop(quantize_awq(layer), "o_proj.qzeros"))
        with pytest.raises(CheckpointError, match=r"2.self_attn.o_proj.qzeros"):
            found.check_complete()

    def test_half_of_a_joined_module_in_awq(self, layer):
        found = examine(quantize_awq(layer, "q_a_proj"))
        with pytest.raises(CheckpointError) as caught:
            plan_load(found, {}, is_separate=False)
        assert "self_attn.q_a_proj is stored as awq/gptq" in str(caught.value)
        assert "fused_qkv_a_proj has to be plain, or of one form" in str(caught.value)

    def test_two_quantised_forms(self, fp8_layer):
        mixed = drop(fp8_layer, "o_proj.weight_scale_inv")
        mixed = {k: v.float() if "o_proj.w" in k else v for k, v in mixed.items()}
        found = examine(quantize_awq(mixed, "o_proj"))
        with pytest.raises(
            CheckpointError, match="cannot have together: awq/gptq, fp8"
        ):
            plan_load(found, {}, is_separate=False)


class TestFindLayers:
    def test_inside_a_model(self, tmp_path):
        folder = save_model(tmp_path, CONFIG, make_model(CONFIG))
        assert list(find_mtp_layers(open_checkpoint(folder))) == [2]

    def test_markers_tell_where_the_config_does_not(self, tmp_path):
        config = make_config()
        del config["num_hidden_layers"]
        folder = save_model(tmp_path, config, make_model(CONFIG))
        assert list(find_mtp_layers(open_checkpoint(folder))) == [2]

    @pytest.mark.parametrize("index", [0, 2, 61])
    def test_in_a_nextn_folder(self, tmp_path, index):
        folder = save_nextn(tmp_path, CONFIG, make_model(CONFIG), index)
        assert list(find_mtp_layers(open_checkpoint(folder))) == [index]

    def test_names_without_model_in_front(self):
        assert split_layer_name("layers.61.enorm.weight") == (61, "enorm.weight")
        assert split_layer_name("model.norm.weight") is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", "b"], "a, b"),
        (["mlp.experts.7.x"], "mlp.experts.7.x"),
        ([f"mlp.experts.{i}.x" for i in range(5)], "mlp.experts.{0..4}.x"),
        ([f"mlp.experts.{i}.x" for i in (1, 3)], "mlp.experts.{1,3}.x"),
        ([f"mlp.experts.{i}.x" for i in range(0, 12, 2)], "mlp.experts.{0,2,4,6,..}.x"),
        ([f"n{i}" for i in range(9)], "n0, n1, n2, n3, n4, n5 and 3 more"),
    ],
)
def test_summarize_names(names, text):
    assert summarize_names(names) == text


def test_joined_modules_are_the_two_attention_inputs():
    from vllm_mtp.checkpoint.plan import FUSED

    assert FUSED["self_attn.fused_qkv_a_proj"] == ATTENTION_INPUTS
