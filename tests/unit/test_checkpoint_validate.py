"""Start-up checks: each refusal names what is wrong, both values and the way out."""

import json
from types import SimpleNamespace

import pytest

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    make_config,
    make_model,
    save_model,
    save_nextn,
    write_config,
)
from vllm_mtp.checkpoint import validate
from vllm_mtp.checkpoint.compare import max_positions
from vllm_mtp.checkpoint.validate import validate_draft_checkpoint
from vllm_mtp.config import SettingsError

CONFIG = make_config()
TENSORS = make_model(CONFIG)


def model_config(folder, max_model_len=128, overrides=None):
    """What of vLLM's ``ModelConfig`` is read."""
    config = json.loads((folder / "config.json").read_text())
    # Transformers fills in 1 where the file says nothing.
    config.setdefault("num_nextn_predict_layers", 1)
    return SimpleNamespace(
        model=str(folder),
        hf_config=SimpleNamespace(**(config | (overrides or {}))),
        hf_overrides=overrides or {},
        max_model_len=max_model_len,
    )


def refuse(config, draft, *words):
    with pytest.raises(SettingsError) as caught:
        validate_draft_checkpoint(config, None if draft is None else str(draft))
    message = str(caught.value)
    assert message.startswith("mtp_tree: ")
    for word in words:
        assert word in message


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "model"
    return model_config(save_model(folder, CONFIG, TENSORS))


def save_nextn_with(tmp_path, index=0, **changes):
    return save_nextn(tmp_path / "nextn", CONFIG | changes, TENSORS, index)


class TestEmbedded:
    def test_complete(self, target):
        plan = validate_draft_checkpoint(target, None)
        assert plan.layer.index == 2
        assert not plan.is_separate
        assert plan.describe().startswith("layer 2 (bfloat16, 2.6 MiB stored), embed")

    @pytest.mark.parametrize(
        ("part", "words"),
        [
            ("layers.2.", "model.layers.2.enorm.weight"),
            ("layers.2.mlp.experts.", "model.layers.2.mlp.experts.{0..3}.gate_proj"),
            ("layers.2.eh_proj", "model.layers.2.eh_proj.weight"),
        ],
        ids=["all", "experts", "eh_proj"],
    )
    def test_dropped_by_a_quantising_tool(self, tmp_path, part, words):
        """C36: the config still announces the layer."""
        kept = {name: t for name, t in TENSORS.items() if part not in name}
        config = model_config(save_model(tmp_path, CONFIG, kept))
        refuse(config, None, "(model.layers.2)", "is incomplete", words)

    def test_broken_file(self, tmp_path):
        folder = save_model(tmp_path, CONFIG, TENSORS)
        path = folder / "model-00001-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        refuse(model_config(folder), None, path.name, "is truncated")


def save_counted(tmp_path, stored, **changes):
    tensors = make_model(CONFIG, mtp_layers=stored)
    config = CONFIG | changes
    if changes.get("num_nextn_predict_layers", 0) is None:
        del config["num_nextn_predict_layers"]
    return save_model(tmp_path, config, tensors)


class TestCount:
    """C39: ``num_nextn_predict_layers`` against the tensors."""

    @pytest.mark.parametrize(
        ("declared", "stored", "words"),
        [
            (0, 0, ["says 0 how many MTP layers", "it stores none", "name a NextN"]),
            (None, 0, ["does not say how many", "it stores none"]),
            (0, 1, ["says 0", "it stores 1 (model.layers.2)", "Set it to 1"]),
            (None, 1, ["does not say", "it stores 1", "--hf-overrides"]),
            (1, 2, ["=1 MTP layers, but it stores 2 (model.layers.2, 3)", "Correct"]),
            (2, 1, ["=2 MTP layers, but it stores 1 (model.layers.2)", "Correct"]),
            (2, 2, ["has 2 MTP layers", "exactly one", "vllm-mtp export --layer 2"]),
            (1, 0, ["(model.layers.2)", "is incomplete: 30 of its tensors"]),
            ("1", 1, ["num_nextn_predict_layers='1'", "a whole number is needed"]),
            (-1, 1, ["num_nextn_predict_layers=-1", "a whole number is needed"]),
        ],
    )
    def test_inside_a_target(self, tmp_path, declared, stored, words):
        folder = save_counted(tmp_path, stored, num_nextn_predict_layers=declared)
        refuse(model_config(folder), None, str(folder), *words)

    def test_override_counts(self, tmp_path):
        """The way out that the message for a missing count names."""
        folder = save_counted(tmp_path, 1, num_nextn_predict_layers=None)
        config = model_config(folder, overrides={"num_nextn_predict_layers": 1})
        assert validate_draft_checkpoint(config, None).layer.index == 2

    @pytest.mark.parametrize(
        ("declared", "words"),
        [(0, "says 0"), (None, "does not say"), (2, "=2 MTP layers, but it stores 1")],
    )
    def test_in_a_nextn_folder(self, tmp_path, target, declared, words):
        folder = save_nextn_with(tmp_path, num_nextn_predict_layers=declared)
        if declared is None:
            config = json.loads((folder / "config.json").read_text())
            del config["num_nextn_predict_layers"]
            write_config(folder, config)
        refuse(target, folder, words)

    def test_target_without_a_layer_drafts_with_a_folder(self, tmp_path):
        bare = {name: t for name, t in TENSORS.items() if "layers.2." not in name}
        folder = save_model(
            tmp_path / "bare", CONFIG | {"num_nextn_predict_layers": 0}, bare
        )
        nextn = save_nextn_with(tmp_path)
        assert validate_draft_checkpoint(model_config(folder), str(nextn))


class TestDraftFolder:
    @pytest.mark.parametrize("index", [0, 2, 61])
    def test_at_any_index(self, tmp_path, target, index):
        plan = validate_draft_checkpoint(target, str(save_nextn_with(tmp_path, index)))
        assert plan.layer.index == index
        assert plan.is_separate

    def test_whole_checkpoint_as_a_draft_folder(self, tmp_path, target):
        """The FP8 checkpoint's layer beside a bfloat16 target."""
        fp8 = CONFIG | {"quantization_config": FP8_CONFIG}
        folder = save_model(tmp_path, fp8, make_model(CONFIG, fp8=True))
        plan = validate_draft_checkpoint(target, str(folder))
        assert plan.describe().startswith("layer 2 (fp8-block")

    @pytest.mark.parametrize(
        ("field", "value", "what"),
        [
            ("hidden_size", 512, "hidden size"),
            ("vocab_size", 1024, "vocabulary"),
            ("num_attention_heads", 4, "attention shape"),
            ("q_lora_rank", 64, "attention shape"),
            ("kv_lora_rank", 256, "attention shape"),
            ("qk_nope_head_dim", 128, "attention shape"),
            ("qk_rope_head_dim", 32, "attention shape"),
            ("v_head_dim", 64, "attention shape"),
            ("n_routed_experts", 8, "experts"),
            ("moe_intermediate_size", 256, "experts"),
            ("num_experts_per_tok", 4, "expert routing"),
        ],
    )
    def test_of_another_model(self, tmp_path, target, field, value, what):
        folder = save_nextn_with(tmp_path, **{field: value})
        both = f"{what}: {field} is {value} there and {CONFIG[field]} in the target"
        refuse(target, folder, str(folder), "another model than the target", both)

    def test_all_differences_are_named(self, tmp_path, target):
        folder = save_nextn_with(tmp_path, hidden_size=512, vocab_size=9)
        refuse(target, folder, "hidden_size is 512", "vocab_size is 9")

    def test_other_shapes_than_its_config_says(self, tmp_path, target):
        """The config agrees, the tensors are of another model."""
        other = make_config(num_attention_heads=4)
        folder = save_nextn(tmp_path, other, make_model(other))
        write_config(folder, CONFIG | {"architectures": ["DeepseekV3ForCausalLMNextN"]})
        refuse(target, folder, "[512, 128] and should be [256, 128]")

    def test_other_architecture(self, tmp_path, target):
        folder = save_nextn_with(tmp_path, model_type="llama")
        refuse(target, folder, "model_type 'llama'", "possible: deepseek_v3")

    def test_two_layers(self, tmp_path, target):
        folder = save_counted(tmp_path, 2, num_nextn_predict_layers=2)
        refuse(target, folder, "has 2 MTP layers", "--layer 2")

    def test_no_layer(self, tmp_path, target):
        bare = {name: t for name, t in TENSORS.items() if "layers.2." not in name}
        folder = save_model(tmp_path, CONFIG, bare)
        refuse(target, folder, "is incomplete: 30 of its tensors")

    def test_incomplete(self, tmp_path, target):
        partial = {k: t for k, t in TENSORS.items() if "shared_head.norm" not in k}
        folder = save_nextn(tmp_path, CONFIG, partial)
        refuse(target, folder, "(model.layers.0)", "model.layers.0.shared_head.norm")

    def test_pickle(self, tmp_path, target):
        folder = save_nextn_with(tmp_path)
        (folder / "nextn.safetensors").rename(folder / "pytorch_model.bin")
        refuse(target, folder, "pytorch_model.bin", "a pickle")


class TestPositions:
    """C26: the draft's rotary table has to cover the target's context."""

    def test_too_few(self, tmp_path, target):
        folder = save_nextn_with(tmp_path, max_position_embeddings=64)
        refuse(target, folder, "covers 64 positions", "max_model_len=128", "at most 64")

    def test_just_enough(self, tmp_path, target):
        folder = save_nextn_with(tmp_path, max_position_embeddings=128)
        assert validate_draft_checkpoint(target, str(folder))

    @pytest.mark.parametrize(
        ("config", "limit"),
        [
            ({}, None),
            ({"max_position_embeddings": 64}, 64),
            (CONFIG, 1024),
            (CONFIG | {"max_position_embeddings": 4096}, 1024),
            (
                {
                    "rope_parameters": {
                        "factor": 2,
                        "original_max_position_embeddings": 8,
                    }
                },
                16,
            ),
            ({"max_position_embeddings": 64, "rope_scaling": {"type": "x"}}, 64),
        ],
    )
    def test_limit_of_a_config(self, config, limit):
        assert max_positions(config) == limit


class TestNotChecked:
    def test_model_of_a_hub(self, target):
        assert validate_draft_checkpoint(target, "org/Model-NextN") is None

    def test_random_weights(self, target):
        assert validate_draft_checkpoint(target, None, load_format="dummy") is None

    def test_config_for_random_weights(self, tmp_path):
        write_config(tmp_path, CONFIG)
        assert validate_draft_checkpoint(model_config(tmp_path), None) is None

    def test_draft_folder_without_weights(self, tmp_path, target):
        write_config(tmp_path, CONFIG)
        refuse(target, tmp_path, "holds no .safetensors file")


def test_no_torch_and_no_vllm_are_imported():
    """The check runs in the front-end process and in tools without vLLM."""
    import subprocess
    import sys

    code = (
        f"import sys, {validate.__name__}, vllm_mtp.checkpoint.export, "
        "vllm_mtp.checkpoint.inspect; "
        "print([m for m in ('torch', 'vllm', 'transformers') "
        "if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
