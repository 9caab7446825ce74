"""``vllm-mtp tune`` on the embedded model: engines of its own, one after another."""

import json

import pytest
from typer.testing import CliRunner

from tests.conftest import GPUS
from tests.helpers.engine import CPU_SETTINGS, MODEL
from vllm_mtp.cli.main import app

KEYS = ("attention_backend", "dtype", "enforce_eager", "kv_cache_memory_bytes")


@pytest.mark.slow
def test_every_shape_is_measured(tmp_path) -> None:
    settings = {} if GPUS else {key: CPU_SETTINGS[key] for key in KEYS}
    path = tmp_path / "tune.json"
    options = ["--shapes", "off,tree:2-2-3,auto", "--batches", "1,2"]
    options += ["--input-len", "32", "--output-len", "24", "--output", str(path)]
    options += ["--engine-args", json.dumps(settings), "--json"]
    result = CliRunner().invoke(app, ["tune", str(MODEL), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert not found["failed"]
    assert {(row["shape"], row["batch"]) for row in found["rows"]} == {
        (shape, batch) for shape in ("off", "tree:2,2,3", "auto") for batch in (1, 2)
    }
    lengths = {row["shape"]: row["accept_length"] for row in found["rows"]}
    assert lengths["off"] == 1
    assert lengths["tree:2,2,3"] > 1.3
