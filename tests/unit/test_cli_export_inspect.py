"""``vllm-mtp export`` and ``vllm-mtp inspect`` as a user meets them."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    make_config,
    make_model,
    save_model,
    save_nextn,
)
from tests.helpers.engine import MODEL
from vllm_mtp.cli.main import COMMANDS, app

CONFIG = make_config()
TENSORS = make_model(CONFIG)
# No colours and no wrapping, whatever runs the tests.
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("cli") / "model", CONFIG, TENSORS)


def run(*arguments, code=0):
    result = runner.invoke(app, [str(item) for item in arguments])
    assert result.exit_code == code, result.output
    return result


class TestMain:
    def test_help_imports_no_command(self):
        """``--help`` stays fast however many commands there are."""
        code = (
            "import sys\n"
            "from vllm_mtp.cli.main import main\n"
            "sys.argv = ['vllm-mtp', '--help']\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "print([m for m in sys.modules if m.startswith('vllm_mtp.cli.')"
            " or m in ('torch', 'numpy', 'vllm')])\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )
        assert run.stdout.splitlines()[-1] == "['vllm_mtp.cli.main']", run.stderr
        for name in COMMANDS:
            assert name in run.stdout

    @pytest.mark.parametrize("name", ["export", "inspect"])
    def test_help_of_a_command(self, name):
        text = " ".join(run(name, "--help").output.split())
        assert f"{name} [OPTIONS]" in text
        assert "--json" in text

    def test_every_command_has_its_function(self):
        import importlib

        for name in COMMANDS:
            module = importlib.import_module(f"vllm_mtp.cli.{name}")
            assert callable(getattr(module, name))

    def test_version(self):
        from vllm_mtp import __version__

        assert run("--version").output.strip() == __version__

    def test_unknown_command(self):
        assert "No such command 'exprot'" in run("exprot", code=2).output


class TestExport:
    def test_writes_and_says_how_to_use_it(self, model, tmp_path):
        out = tmp_path / "nextn"
        result = run("export", "--input-dir", model, "--output-dir", out)
        assert (out / "config.json").exists()
        assert f"Layer 2 -> {out}: 30 tensors, 2.1 MiB, bfloat16, in " in result.output
        assert "Copied: tokenizer_config.json" in result.output
        setting = result.output.split("--speculative-config '")[1].split("'")[0]
        assert json.loads(setting) == {"method": "mtp_tree", "model": str(out)}

    def test_json(self, model, tmp_path):
        out = tmp_path / "nextn"
        arguments = ["--input-dir", model, "--output-dir", out, "--json"]
        result = json.loads(run("export", *arguments).stdout)
        seconds = result.pop("seconds")
        assert 0 < seconds < 600
        nbytes = result.pop("nbytes")
        assert nbytes == sum(
            t.numel() * t.element_size()
            for name, t in TENSORS.items()
            if "layers.2." in name
            and not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        )
        assert result == {
            "output_dir": str(out),
            "layer": 2,
            "precision": "bfloat16",
            "num_tensors": 30,
            "copied_files": ["tokenizer_config.json"],
        }

    def test_options_reach_the_export(self, tmp_path):
        config = CONFIG | {"quantization_config": FP8_CONFIG}
        source = save_model(tmp_path / "m", config, make_model(CONFIG, fp8=True))
        result = run(
            *("export", "--input-dir", source, "--output-dir", tmp_path / "n"),
            *("--dtype", "bfloat16", "--layer", "2", "--json"),
        )
        assert json.loads(result.stdout)["precision"] == "bfloat16"

    def test_refusal_is_one_message_and_an_exit_code(self, model, tmp_path):
        (tmp_path / "n").mkdir()
        (tmp_path / "n" / "x").write_text("x")
        result = run(
            *("export", "--input-dir", model, "--output-dir", tmp_path / "n"), code=1
        )
        assert result.stderr.startswith("Error: ")
        assert "exists already. Remove it" in result.stderr
        assert "Traceback" not in result.output

    def test_words_in_brackets_are_not_taken_for_colours(self, tmp_path):
        """Shapes such as [256] would vanish as markup."""
        tensors = dict(TENSORS)
        name = "model.layers.2.enorm.weight"
        tensors[name] = tensors[name][:100].clone()
        source = save_model(tmp_path / "m", CONFIG, tensors)
        result = run(
            *("export", "--input-dir", source, "--output-dir", tmp_path / "n"), code=1
        )
        assert "enorm.weight is [100] and should be [256]" in result.stderr


class TestInspect:
    def test_model(self, model):
        text = run("inspect", model).output
        for words in (
            "model with an MTP layer",
            "1 declared, 1 stored",
            "none declared",
            "3 files",
            "layer 2",
            "own copies: embedding, head",
            "mtp_tree drafts with layer 2 (bfloat16",
            "embedding and head shared with the target",
        ):
            assert words in text

    def test_one_of_a_kind_is_not_plural(self):
        text = run("inspect", MODEL).output
        assert "1 file" in text
        assert "1 files" not in text

    def test_nextn_folder(self, tmp_path):
        config = CONFIG | {"quantization_config": FP8_CONFIG}
        folder = save_nextn(tmp_path / "n", config, make_model(CONFIG, fp8=True))
        text = run("inspect", folder).output
        for words in (
            "NextN folder",
            "DeepseekV3ForCausalLMNextN",
            "fp8-block",
            "own copies: none",
            'mtp_tree as "model" in --speculative-config: drafts with layer 0',
        ):
            assert words in text

    def test_json(self, model):
        report = json.loads(run("inspect", model, "--json").stdout)
        assert report["usable"] is True
        assert report["kind"] == "model with an MTP layer"
        assert report["num_nextn_predict_layers"] == 1
        assert report["num_tensors"] == len(TENSORS)
        assert report["max_positions"] == 1024
        assert report["quantization_method"] is None
        [layer] = report["layers"]
        assert layer["index"] == 2
        assert layer["precision"] == "bfloat16"
        assert layer["missing"] == layer["faults"] == layer["unexpected"] == []
        assert layer["own_embedding"] is layer["own_head"] is True

    def test_incomplete_layer(self, tmp_path):
        tensors = {k: t for k, t in TENSORS.items() if ".experts." not in k}
        tensors["model.layers.2.adapter.weight"] = tensors["lm_head.weight"].clone()
        tensors["model.layers.2.enorm.weight"] = tensors["lm_head.weight"].clone()
        folder = save_model(tmp_path, CONFIG, tensors)
        text = run("inspect", folder, code=1).output
        assert "mlp.experts.{0..3}.gate_proj.weight" in text
        assert "enorm.weight is [512, 256] and should be [256]" in text
        assert "adapter.weight" in text
        assert "mtp_tree refuses: the MTP layer (model.layers.2)" in text
        report = json.loads(run("inspect", folder, "--json", code=1).stdout)
        assert report["usable"] is False
        assert len(report["layers"][0]["missing"]) == 12

    def test_model_without_a_layer(self, tmp_path):
        tensors = {k: t for k, t in TENSORS.items() if "layers.2." not in k}
        folder = save_model(tmp_path, CONFIG | {"num_nextn_predict_layers": 0}, tensors)
        text = run("inspect", folder, code=1).output
        assert "model without an MTP layer" in text
        assert "mtp_tree refuses: the config of" in text

    def test_other_architecture(self, tmp_path):
        config = CONFIG | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        folder = save_model(tmp_path, config, TENSORS)
        text = run("inspect", folder, code=1).output
        assert "mtp_tree refuses: " in text
        assert "model_type 'llama'" in text

    def test_neither_model_nor_draft(self, tmp_path):
        folder = save_model(
            tmp_path, CONFIG, {"x": TENSORS["lm_head.weight"]}, shards=1
        )
        assert "unknown" in run("inspect", folder, code=1).output

    def test_draft_folder_under_another_name(self, tmp_path):
        layer = {k: t for k, t in TENSORS.items() if "layers.2." in k}
        folder = save_model(tmp_path, CONFIG, layer)
        assert "draft folder" in run("inspect", folder).output

    def test_broken_folder(self, tmp_path):
        result = run("inspect", tmp_path, code=1)
        assert "config.json cannot be read" in result.stderr
