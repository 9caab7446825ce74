"""NextN export: every byte where it belongs, or nothing at all."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    make_config,
    make_model,
    save_model,
    save_nextn,
)
from vllm_mtp.checkpoint.dequantize import E4M3_VALUES, round_to_bfloat16
from vllm_mtp.checkpoint.export import WEIGHTS_NAME, export_nextn
from vllm_mtp.checkpoint.export_config import build_config
from vllm_mtp.checkpoint.folder import INDEX_NAME, open_checkpoint
from vllm_mtp.checkpoint.safetensors_file import CheckpointError
from vllm_mtp.checkpoint.validate import check_draft_folder

# 192 is no multiple of 128, so that edge blocks of FP8 scales are cut.
CONFIG = make_config(hidden_size=192, q_lora_rank=96)
FP8 = CONFIG | {"quantization_config": FP8_CONFIG}


def bits(tensor):
    """A tensor's bits, so that NaN and zero's sign count too."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def layer_of(tensors, index=2):
    """What an export of a model's layer should hold, by name."""
    return {
        name.replace(f"layers.{index}.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if f"layers.{index}." in name
        and not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Precision -> folder and tensors."""
    made = {}
    for name, config in (("bf16", CONFIG), ("fp8", FP8)):
        tensors = make_model(CONFIG, fp8=name == "fp8")
        folder = tmp_path_factory.mktemp(name) / "model"
        made[name] = save_model(folder, config, tensors), tensors
    return made


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_round_trip_is_bit_for_bit(models, tmp_path, precision):
    folder, tensors = models[precision]
    result = export_nextn(folder, tmp_path / "nextn")
    written = load_file(tmp_path / "nextn" / WEIGHTS_NAME)
    assert_same(written, layer_of(tensors))
    assert result.layer == 2
    assert result.num_tensors == len(written)
    assert result.nbytes == sum(t.numel() * t.element_size() for t in written.values())
    assert result.precision == ("fp8-block" if precision == "fp8" else "bfloat16")


def test_layout_is_sglangs(models, tmp_path):
    """What its loader asks for: names, one hidden layer, architecture, index."""
    folder, _ = models["fp8"]
    export_nextn(folder, tmp_path / "nextn")
    out = tmp_path / "nextn"
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLMNextN"]
    assert config["num_hidden_layers"] == config["num_nextn_predict_layers"] == 1
    assert config["quantization_config"] == FP8_CONFIG
    unchanged = set(FP8) - {"architectures", "num_hidden_layers"}
    assert all(config[key] == FP8[key] for key in unchanged)
    index = json.loads((out / INDEX_NAME).read_text())
    names = set(load_file(out / WEIGHTS_NAME))
    assert index["weight_map"] == dict.fromkeys(names, WEIGHTS_NAME)
    assert all(name.startswith("model.layers.0.") for name in names)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        INDEX_NAME,
        WEIGHTS_NAME,
        "tokenizer_config.json",
    ]


def test_written_file_is_aligned_for_every_reader(tmp_path):
    """A float32 tensor after an odd number of FP8 bytes could not be mapped."""
    config = make_config(hidden_size=191)
    tensors = make_model(config, fp8=True)
    folder = save_model(tmp_path / "m", config, tensors)
    export_nextn(folder, tmp_path / "nextn")
    for entry in open_checkpoint(tmp_path / "nextn").tensors.values():
        width = {"F32": 4, "BF16": 2, "F8_E4M3": 1}[entry.dtype]
        assert entry.offset % width == 0, entry.name


def test_dequantised_like_torch(models, tmp_path):
    """The reference multiplies in float32 and rounds once, as DeepSeek's own script."""
    folder, tensors = models["fp8"]
    result = export_nextn(folder, tmp_path / "nextn", dtype="bfloat16")
    expected = {}
    layer = layer_of(tensors)
    for name, tensor in layer.items():
        if name.endswith("_scale_inv"):
            continue
        scale = layer.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensor = (tensor.float() * spread[:rows, :columns]).bfloat16()
        expected[name] = tensor
    assert_same(load_file(tmp_path / "nextn" / WEIGHTS_NAME), expected)
    config = json.loads((tmp_path / "nextn" / "config.json").read_text())
    assert "quantization_config" not in config
    assert result.precision == "bfloat16"
    bias = expected["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32, "the router's bias is not rounded"


@pytest.mark.parametrize("shape", [(), (1,), (256,), (256, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantises_one_scale_a_tensor_or_a_row(tmp_path, shape, dtype):
    config = make_config()
    tensors = make_model(config)
    name = "model.layers.2.self_attn.q_b_proj.weight"
    scale = (torch.rand(shape) + 0.5).to(dtype)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = scale
    folder = save_model(tmp_path / "m", config, tensors)
    export_nextn(folder, tmp_path / "nextn", dtype="bfloat16")
    written = load_file(tmp_path / "nextn" / WEIGHTS_NAME)
    spread = scale.float() if scale.dim() == 0 else scale.float().reshape(-1, 1)
    expected = (tensors[name].float() * spread).bfloat16()
    assert torch.equal(written[name.replace("2", "0", 1)], expected)
    assert f"{name}_scale".replace("2", "0", 1) not in written


def test_float32_and_float16_are_rounded_too(tmp_path):
    config = make_config()
    tensors = make_model(config)
    names = [f"model.layers.2.{part}.weight" for part in ("eh_proj", "enorm")]
    tensors[names[0]] = torch.randn(256, 512)
    tensors[names[1]] = torch.randn(256).half()
    folder = save_model(tmp_path / "m", config, tensors)
    export_nextn(folder, tmp_path / "nextn", dtype="bfloat16")
    written = load_file(tmp_path / "nextn" / WEIGHTS_NAME)
    for name in names:
        found = written[name.replace("2", "0", 1)]
        assert torch.equal(found, tensors[name].bfloat16())


def test_e4m3_values_are_torchs():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3_VALUES, expected)


def test_rounding_is_torchs():
    edges = [0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, 1e-40, float("inf"), -1.5]
    values = torch.cat([torch.tensor(edges), torch.randn(10_000)])
    expected = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(round_to_bfloat16(values.numpy()), expected)


def test_nan_stays_nan():
    """A NaN with a long tail of ones would round up to a zero."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], dtype=np.uint32)
    rounded = round_to_bfloat16(bits.view(np.float32))
    assert torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16).isnan().all()


def test_plain_layer_of_an_fp8_model_declares_no_quantisation(tmp_path):
    """Else a loader would look for scales that are not there (C38)."""
    tensors = make_model(CONFIG, fp8=True, mtp_fp8=False)
    folder = save_model(tmp_path / "m", FP8, tensors)
    (folder / "hf_quant_config.json").write_text("{}")
    export_nextn(folder, tmp_path / "nextn")
    config = json.loads((tmp_path / "nextn" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "nextn" / "hf_quant_config.json").exists()


def test_ignore_lists_follow_the_layer(models, tmp_path):
    folder, tensors = models["fp8"]
    quantization = FP8_CONFIG | {
        "ignore": [
            "lm_head",
            "model.layers.2.self_attn.o_proj",
            "model.layers.0.self_attn.o_proj",
            "model.layers.20.mlp",
            r"re:.*layers\.2\.mlp.*",
        ]
    }
    plain = make_model(CONFIG)
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    mixed = {k: v for k, v in tensors.items() if k != f"{name}_scale_inv"}
    mixed[name] = plain[name]
    config = CONFIG | {"quantization_config": quantization}
    folder = save_model(tmp_path / "m", config, mixed)
    export_nextn(folder, tmp_path / "nextn")
    written = json.loads((tmp_path / "nextn" / "config.json").read_text())
    found = written["quantization_config"]
    assert found["ignore"] == [
        "lm_head",
        "model.layers.0.self_attn.o_proj",
        r"re:.*layers\.0\.mlp.*",
    ]
    assert found["modules_to_not_convert"] == ["model.layers.0.self_attn.kv_b_proj"]
    assert (
        check_draft_folder(open_checkpoint(tmp_path / "nextn"), CONFIG).layer.index == 0
    )


def test_quantisation_that_is_no_object_is_left_alone(models):
    checkpoint = open_checkpoint(models["fp8"][0])
    checkpoint.config["quantization_config"] = "odd"
    plan = check_draft_folder(checkpoint, CONFIG)
    config = build_config(checkpoint, plan.layer, is_plain=False)
    assert config["quantization_config"] == "odd"
    checkpoint.config["quantization_config"] = FP8_CONFIG


def test_nextn_folder_can_be_rewritten(models, tmp_path):
    """A kept index becomes 0, and its own embedding and head are dropped."""
    _, tensors = models["fp8"]
    source = save_nextn(tmp_path / "kept", FP8, tensors, index=61, own=True)
    export_nextn(source, tmp_path / "nextn")
    assert_same(load_file(tmp_path / "nextn" / WEIGHTS_NAME), layer_of(tensors))


def test_progress_reaches_the_total(models, tmp_path):
    calls = []
    result = export_nextn(
        models["bf16"][0], tmp_path / "n", on_bytes=lambda *args: calls.append(args)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (result.nbytes, result.nbytes)


class TestSeveralLayers:
    @pytest.fixture
    def folder(self, tmp_path):
        config = CONFIG | {"num_nextn_predict_layers": 2}
        return save_model(tmp_path / "m", config, make_model(CONFIG, mtp_layers=2))

    def test_one_is_chosen(self, folder, tmp_path):
        result = export_nextn(folder, tmp_path / "nextn", layer=3)
        assert result.layer == 3
        expected = layer_of(make_model(CONFIG, mtp_layers=2), 3)
        assert_same(load_file(tmp_path / "nextn" / WEIGHTS_NAME), expected)

    @pytest.mark.parametrize(
        ("layer", "words"),
        [(None, r"2 MTP layers; choose one with --layer: 2, 3"), (7, "no MTP layer 7")],
    )
    def test_none_is_guessed(self, folder, tmp_path, layer, words):
        with pytest.raises(CheckpointError, match=words):
            export_nextn(folder, tmp_path / "nextn", layer=layer)


@pytest.mark.parametrize("fails", ["missing", "refused"])
def test_copies_without_the_kernels_help(models, tmp_path, monkeypatch, fails):
    """Other systems have no copy_file_range, and some file systems refuse it."""
    if fails == "missing":
        monkeypatch.delattr(os, "copy_file_range")
    else:

        def refuse(*_):
            raise OSError("not here")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    folder, tensors = models["fp8"]
    export_nextn(folder, tmp_path / "n")
    assert_same(load_file(tmp_path / "n" / WEIGHTS_NAME), layer_of(tensors))
