"""Importing and registering stay cheap: no vLLM engine, CUDA or Triton on the way."""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_mtp"


def modules_after(code: str, *names: str) -> list[str]:
    probe = f"{code}\nimport sys\nprint([n for n in {names!r} if n in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    return eval(out.stdout.splitlines()[-1])


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    assert modules_after("import vllm_mtp", "torch", "triton", "vllm") == []


def test_registering_imports_no_triton_kernel_of_ours() -> None:
    code = "from vllm_mtp.plugin import register; register(); register()"
    loaded = modules_after(
        code, "vllm_mtp.runner", "vllm_mtp.kernels.tree_topk", "vllm_mtp.attention.base"
    )
    assert loaded == []


def test_every_logger_is_below_vllms() -> None:
    """vLLM only shows what is logged below ``vllm``; our package is not."""
    found = {
        str(path.relative_to(PACKAGE)): line
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("logger = ")
    }
    assert len(found) > 5
    assert set(found.values()) == {'logger = logging.getLogger("vllm." + __name__)'}
