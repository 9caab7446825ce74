"""The wheel is the same bytes whenever and wherever it is built from a commit."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_two_builds_are_equal(tmp_path: Path) -> None:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77, which pyproject.toml names")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    # The script under test is the one in the working tree.
    (clone / ".ci" / "wheel").write_bytes((ROOT / ".ci" / "wheel").read_bytes())
    done = subprocess.run(
        ["bash", str(clone / ".ci" / "wheel"), "--no-build-isolation"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (clone / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "vllm_mtp/plugin.py" in names
    assert "vllm_mtp/trace/page.html" in names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/"))]
