"""NextN export: what it refuses, that it is all or nothing, and what it costs."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    make_config,
    make_model,
    save_model,
    write_config,
)
from vllm_mtp.checkpoint.export import export_nextn
from vllm_mtp.checkpoint.folder import open_checkpoint
from vllm_mtp.checkpoint.safetensors_file import CheckpointError
from vllm_mtp.checkpoint.write import atomic_folder

CONFIG = make_config(hidden_size=192, q_lora_rank=96)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    return save_model(folder, CONFIG, make_model(CONFIG))


class TestRefusals:
    def refuse(self, source, output, words, **options):
        with pytest.raises(CheckpointError, match=words):
            export_nextn(source, output, **options)
        assert not output.exists() or not (output / "config.json").exists()
        assert not list(output.parent.glob(f".{output.name}.partial"))

    def test_incomplete_layer(self, tmp_path):
        tensors = {k: v for k, v in make_model(CONFIG).items() if "eh_proj" not in k}
        folder = save_model(tmp_path / "m", CONFIG, tensors)
        self.refuse(folder, tmp_path / "n", r"layers.2\) of .* is incomplete")

    def test_no_layer(self, tmp_path):
        tensors = {k: v for k, v in make_model(CONFIG).items() if "layers.2" not in k}
        folder = save_model(tmp_path / "m", CONFIG, tensors)
        self.refuse(
            folder, tmp_path / "n", "stores no MTP layer: .*num_hidden_layers=2"
        )

    def test_other_architecture(self, tmp_path, model):
        folder = shutil.copytree(model, tmp_path / "m")
        write_config(folder, CONFIG | {"model_type": "llama"})
        self.refuse(folder, tmp_path / "n", "model_type 'llama'; possible: deepseek_v3")

    def test_config_without_shapes(self, tmp_path, model):
        folder = shutil.copytree(model, tmp_path / "m")
        write_config(folder, CONFIG | {"kv_lora_rank": None, "v_head_dim": "x"})
        self.refuse(
            folder, tmp_path / "n", "not give kv_lora_rank, v_head_dim as whole"
        )

    def test_unknown_dtype(self, tmp_path, model):
        words = "--dtype float16 is unknown; use auto or bfloat16"
        self.refuse(model, tmp_path / "n", words, dtype="float16")

    def test_output_exists(self, tmp_path, model):
        (tmp_path / "n").mkdir()
        (tmp_path / "n" / "precious").write_text("x")
        self.refuse(model, tmp_path / "n", "exists already. Remove it")
        assert (tmp_path / "n" / "precious").read_text() == "x"

    def test_output_is_a_file(self, tmp_path, model):
        (tmp_path / "n").write_text("x")
        with pytest.raises(CheckpointError, match="exists already"):
            export_nextn(model, tmp_path / "n")

    def test_disk_too_small(self, tmp_path, model, monkeypatch):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        words = r"takes [\d,]+ bytes, but only 1,000 are free"
        self.refuse(model, tmp_path / "n", words)

    def test_other_quantisation_cannot_be_dequantised(self, tmp_path):
        tensors = make_model(CONFIG)
        name = "model.layers.2.self_attn.o_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)
        tensors[f"{name}_scale"] = torch.ones(192)
        folder = save_model(tmp_path / "m", CONFIG, tensors)
        words = "self_attn.o_proj is stored as int8. Export without"
        self.refuse(folder, tmp_path / "n", words, dtype="bfloat16")

    @pytest.mark.parametrize(
        ("scale", "words"),
        [
            (torch.ones(3, 5), r"\[3, 5\]; for .*one value, \[256, 1\] or \[2, 1\]"),
            (torch.ones(256).half(), "as F16; scales of F32 or BF16"),
        ],
    )
    def test_scales_that_do_not_fit(self, tmp_path, scale, words):
        config = make_config()
        tensors = make_model(config)
        name = "model.layers.2.self_attn.q_b_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        folder = save_model(tmp_path / "m", config, tensors)
        self.refuse(folder, tmp_path / "n", words, dtype="bfloat16")

    def test_source_that_shrinks_meanwhile(self, tmp_path, model):
        folder = shutil.copytree(model, tmp_path / "m")

        def cut(*_):
            for path in folder.glob("*.safetensors"):
                os.truncate(path, 100)

        words = "became shorter while .* was copied"
        self.refuse(folder, tmp_path / "n", words, on_bytes=cut)


class TestAtomic:
    def test_error_leaves_nothing(self, model, tmp_path):
        def fail(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_nextn(model, tmp_path / "n", on_bytes=fail)
        assert not list(tmp_path.iterdir())

    def test_killed_export_leaves_nothing_that_looks_complete(self, model, tmp_path):
        """SIGKILL between two tensors; then a new export clears the rest."""
        code = (
            "import pathlib, sys, time\n"
            "from vllm_mtp.checkpoint.export import export_nextn\n"
            "def wait(done, total):\n"
            "    if done > total // 2:\n"
            "        print('half', flush=True); time.sleep(600)\n"
            "export_nextn(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]),"
            " on_bytes=wait)\n"
        )
        source, output = model, tmp_path / "n"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(output)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        with pytest.raises(CheckpointError, match="another export is writing"):
            export_nextn(source, output)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        partial = tmp_path / ".n.partial"
        assert not output.exists()
        assert partial.exists()
        with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
            open_checkpoint(partial)
        (partial / "folder").mkdir()
        export_nextn(source, output)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["n"]
        assert not (output / "folder").exists()

    def test_empty_folder_may_be_there(self, model, tmp_path):
        (tmp_path / "n").mkdir()
        export_nextn(model, tmp_path / "n")
        assert (tmp_path / "n" / "config.json").exists()

    def test_lock_is_gone_afterwards(self, tmp_path):
        with atomic_folder(tmp_path / "n") as folder:
            (folder / "x").write_text("x")
        lock = os.open(tmp_path / "n", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)


# Not getrusage's maximum, which a child inherits from a test process full of torch.
MEASURE = r"""
import json, pathlib, re, sys
from vllm_mtp.checkpoint.export import export_nextn
result = export_nextn(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
status = pathlib.Path("/proc/self/status").read_text()
peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
print(json.dumps({"peak": peak, "seconds": result.seconds, "nbytes": result.nbytes}))
"""


def save_big(folder: Path, gigabytes: float) -> dict:
    """A checkpoint whose MTP layer alone has this size, most of it in FP8."""
    config = make_config(hidden_size=4096, vocab_size=128, moe_intermediate_size=4096)
    expert = 3 * 4096 * 4096
    config["n_routed_experts"] = experts = int(gigabytes * 1e9 / expert)
    small = make_model(config | {"n_routed_experts": 0, "n_group": 1})
    weight = torch.randint(0, 120, (4096, 4096), dtype=torch.uint8)
    weight = weight.view(torch.float8_e4m3fn)
    scale = torch.rand(32, 32)
    folder.mkdir()
    layer = {k: v for k, v in small.items() if "layers.2" in k or "embed" in k}
    layer["model.layers.2.mlp.gate.weight"] = torch.zeros(experts, 4096).bfloat16()
    layer["model.layers.2.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    save_file(layer, folder / "model-small.safetensors")
    for first in range(0, experts, 8):
        shard = {}
        for index in range(first, min(first + 8, experts)):
            for part in ("gate", "up", "down"):
                name = f"model.layers.2.mlp.experts.{index}.{part}_proj.weight"
                shard[name] = weight.clone()
                shard[f"{name}_scale_inv"] = scale.clone()
        save_file(shard, folder / f"model-{first}.safetensors")
    write_config(folder, config | {"quantization_config": FP8_CONFIG})
    return config


def copy_files(source: Path, output: Path) -> float:
    """Seconds for a plain copy of a folder's weights, to the disk."""
    # Else the copy would also pay for what is still to be written of its source.
    os.sync()
    started = time.perf_counter()
    output.mkdir()
    for path in source.glob("*.safetensors"):
        with path.open("rb") as read, (output / path.name).open("wb") as write:
            shutil.copyfileobj(read, write, 16 * 2**20)
            write.flush()
            os.fsync(write.fileno())
    return time.perf_counter() - started


def measure(source, output, dtype="auto"):
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(output), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_memory_stays_small(tmp_path, dtype):
    """A few tens of MB with the interpreter and numpy, for a layer of 0.2 GB."""
    save_big(tmp_path / "big", 0.2)
    found = measure(tmp_path / "big", tmp_path / "nextn", dtype)
    assert found["nbytes"] > 0.15e9
    assert 10e6 < found["peak"] < 120e6


@pytest.mark.slow
def test_four_gigabytes_at_the_speed_of_a_copy(tmp_path, capsys):
    save_big(tmp_path / "big", 4)
    copied = copy_files(tmp_path / "big", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")
    os.sync()
    found = measure(tmp_path / "big", tmp_path / "nextn")
    ratio = found["seconds"] / copied
    with capsys.disabled():
        print(
            f"\nexport of {found['nbytes'] / 1e9:.2f} GB: {found['seconds']:.1f} s, "
            f"{ratio:.2f} x a file copy ({copied:.1f} s), peak memory "
            f"{found['peak'] / 1e6:.0f} MB"
        )
    largest = 4096 * 4096
    assert found["peak"] < 2 * largest + 300e6
    assert ratio < 1.5
