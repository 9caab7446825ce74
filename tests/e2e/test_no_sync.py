"""No decode step waits for the device: vLLM's own check, set to fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
def test_steps_make_no_host_sync() -> None:
    """The check covers ``execute_model`` and ``sample_tokens`` after the warm-up."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.no_sync"],
        cwd=ROOT,
        env=os.environ | {"VLLM_GPU_SYNC_CHECK": "error"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = done.stdout.splitlines()
    assert "tree clean" in lines, done.stderr[-4000:]
    assert any(line.startswith("caught") for line in lines), done.stdout
    assert "auto clean" in lines, done.stderr[-4000:]
