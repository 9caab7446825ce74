"""Installed but not asked for: stock runs are what they are without the plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PROBE = """
import json, sys
from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.prompts import held_out
from vllm import SamplingParams
spec = json.loads(sys.argv[1])
with engine(spec) as llm:
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16) for t in (0.0, 0.8)]
    ids = generate(llm, held_out(2), params)
    kind = type(runner_of(llm)).__module__
print("RESULT " + json.dumps([ids, kind]))
"""


def run(spec: dict[str, Any] | None, plugins: str | None) -> tuple[Any, str]:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": str(ROOT)}
    if plugins is not None:
        # The stub Triton backend is the harness of both runs.
        env["VLLM_PLUGINS"] = plugins
    code = PROBE
    if plugins is not None:
        code = "import vllm_mtp.cpu; vllm_mtp.cpu.activate()\n" + PROBE
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(spec)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT ")), done.stdout + done.stderr


@pytest.mark.parametrize(
    "spec", [None, {"method": "mtp", "num_speculative_tokens": 2}], ids=["off", "mtp"]
)
def test_nothing_changes(spec: dict[str, Any] | None) -> None:
    (ids, runner), log = run(spec, None)
    (ids_without, runner_without), _ = run(spec, "none")
    assert ids == ids_without
    assert runner == runner_without
    warnings = [x for x in log.splitlines() if "WARNING" in x and "mtp_tree" in x]
    assert warnings == []
