"""Shared set-up: interpreted kernels where there is no GPU, reasons for skips."""

import os
import subprocess

import pytest


def _gpu_count() -> int:
    """GPUs seen by the driver; asked without importing torch or Triton."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return out.count("GPU ")


GPUS = _gpu_count()
if GPUS == 0:
    # Before the first import of triton: its decorators read this once.
    os.environ["TRITON_INTERPRET"] = "1"
    # Where several test processes share few cores, threads that wait for each other
    # by spinning make a step up to eight times slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and needed > GPUS:
                reason = f"needs {needed} CUDA GPU(s), found {GPUS}"
                item.add_marker(pytest.mark.skip(reason=reason))
