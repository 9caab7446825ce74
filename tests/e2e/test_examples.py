"""The examples run as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_offline_generate_prints_one_json_object() -> None:
    command = [sys.executable, "examples/offline_generate.py", "--json"]
    command += ["--num-prompts", "2", "--max-tokens", "24"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["identical"] is True
    assert report["speculative_config"] == {"method": "mtp_tree"}
    assert 1 < report["accept_length"] <= 4
    assert report["steps"] < report["steps_without"] == report["tokens"]
    assert report["accepted_per_depth"]
