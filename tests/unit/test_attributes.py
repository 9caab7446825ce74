"""Classes below vLLM's set no attribute that vLLM's own use for something else."""

import ast
import inspect
import textwrap

import pytest

pytest.importorskip("vllm")

import vllm.config  # noqa: F401  (first: vLLM's modules import each other)

from vllm_mtp.auto.scheduler import AutoShapeAsyncScheduler, AutoShapeScheduler
from vllm_mtp.runner import TreeModelRunner
from vllm_mtp.scheduler import TreeAsyncScheduler
from vllm_mtp.speculator import MTPTreeSpeculator
from vllm_mtp.verifier import TreeVerifier
from vllm_mtp.worker import TreeWorker

MEANT = {
    # Put in place of vLLM's, on purpose.
    "adaptive_verification",
    "decode_cudagraph_manager",
    "decode_query_len",
    "dynamic_sd_lookup",
    "rejection_sampler",
    "supports_decode_metadata_update",
}


def assigned(cls: type) -> set[str]:
    """Names that the class's own source assigns on ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize(
    "cls",
    [
        AutoShapeAsyncScheduler,
        AutoShapeScheduler,
        TreeAsyncScheduler,
        MTPTreeSpeculator,
        TreeModelRunner,
        TreeVerifier,
        TreeWorker,
    ],
)
def test_no_attribute_of_vllm_is_overwritten(cls: type) -> None:
    ours: set[str] = set()
    theirs: set[str] = set()
    for base in cls.__mro__:
        package = base.__module__.split(".")[0]
        if package == "vllm_mtp":
            ours |= assigned(base)
        elif package == "vllm":
            theirs |= assigned(base) | set(vars(base))
    assert theirs
    assert ours & theirs <= MEANT
