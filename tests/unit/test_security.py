"""What SECURITY.md states about the package's source."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_mtp"

FORBIDDEN_MODULES = {
    *("pickle", "cloudpickle", "dill", "marshal", "shelve", "subprocess"),
    *("socket", "urllib", "http", "requests", "ctypes"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "os.system", "os.popen", "np.load", "numpy.load", "yaml.load"),
}
ALLOWED = {("cpu/dispatch_plan.py", "exec")}
"""Functions written from the names of Triton's own operations; no data reaches them."""


def uses(path: Path) -> Iterator[str]:
    """Forbidden modules imported and forbidden calls made in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if is_forbidden(a.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            if is_forbidden(node.module):
                yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            yield ast.unparse(node.func)


def is_forbidden(module: str) -> bool:
    return module.split(".")[0] in FORBIDDEN_MODULES


def test_nothing_is_unpickled_evaluated_or_started() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), use)
        for path in PACKAGE.rglob("*.py")
        for use in uses(path)
    }
    assert found == ALLOWED
