"""The stub Triton backend ``cpu``: names a target and never compiles anything.

Under ``TRITON_INTERPRET=1`` Triton runs kernels as Python over CPU tensors, so neither
the compiler nor the launcher below is ever asked to work; they exist to be found.
Source: ``BaseBackend`` of ``triton.backends.compiler`` and ``DriverBase`` of
``triton.backends.driver``, Triton 3.6 to 3.9.
"""

from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from triton import backends as triton_backends
from triton.backends.compiler import BaseBackend, GPUTarget, Language
from triton.backends.driver import DriverBase

BACKEND_NAME = "cpu"


def _refuse() -> NoReturn:
    raise RuntimeError(
        "vllm_mtp's stub Triton backend only interprets kernels. Set "
        "TRITON_INTERPRET=1 before the first import of triton, or unset it and use a "
        "machine with a GPU."
    )


class InterpreterCompiler(BaseBackend):  # type: ignore[misc]
    """Never compiles."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == BACKEND_NAME)

    def hash(self) -> str:
        return "vllm-mtp-interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        _refuse()

    def add_stages(
        self, stages: dict[str, Any], options: object, language: Language
    ) -> None:
        _refuse()

    def load_dialects(self, context: Any) -> None:
        _refuse()

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}


class InterpreterDriver(DriverBase):  # type: ignore[misc]
    """Reports the CPU as the active device."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = None

    @classmethod
    def is_active(cls) -> bool:
        from vllm_mtp.cpu import is_requested

        return is_requested()

    def map_python_to_cpp_type(self, ty: str) -> str:
        _refuse()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(BACKEND_NAME, "interpreter", 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        _refuse()


class _NoScope:
    """What a launch restores when the interpreter stays patched: nothing."""

    def restore(self) -> None:
        return


def keep_interpreter_patched() -> None:
    """Patch ``triton.language`` for interpretation once instead of at every call.

    Triton replaces every builtin of ``tl`` at each launch and at each call of a jitted
    helper, and undoes it after the launch; that was about half of an interpreted step.
    Nothing is compiled in such a process, so it may stay patched, and each operation
    may remember what it does (``dispatch_memo``). Triton 3.6 to 3.9:
    ``triton.runtime.interpreter._patch_lang``; left alone where that looks different.
    """
    from triton import language
    from triton.runtime import interpreter

    from vllm_mtp.cpu.dispatch_memo import find_builtins, memoise_dispatch

    original = getattr(interpreter, "_patch_lang", None)
    if original is None or getattr(original, "_vllm_mtp_once", False):
        return

    def both_languages_visible() -> None:
        """Only its globals matter."""

    seen = {"tl": language, "core": language.core}
    builtins = find_builtins()
    original(FunctionType(both_languages_visible.__code__, seen))
    memoise_dispatch(builtins)

    def patched_already(fn: Any) -> _NoScope:
        return _NoScope()

    patched_already._vllm_mtp_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patched_already
    # Compiled kernels do not check integer overflow either unless in debug mode.
    options = interpreter.interpreter_builder.options
    if hasattr(options, "sanitize_overflow"):
        object.__setattr__(options, "sanitize_overflow", False)


def keep_comparisons_boolean() -> None:
    """Let a comparison of scalars be a mask after it was broadcast.

    Triton 3.9's interpreter gives the result of a comparison its operands' type, which
    turns it into integers when it meets a block; loads and stores refuse these. vLLM's
    kernel for grammars is the one that does it.
    """
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.create_splat
    if getattr(original, "_vllm_mtp_boolean", False):
        return

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == bool and arg.dtype != language.int1:
            arg = interpreter.TensorHandle(arg.data, language.int1)
        return original(self, ret_ty, arg)

    create_splat._vllm_mtp_boolean = True  # type: ignore[attr-defined]
    builder.create_splat = create_splat


def register_backend() -> None:
    """Make ``triton.backends.backends["cpu"]`` exist. A real one is left in place."""
    keep_interpreter_patched()
    keep_comparisons_boolean()
    known = triton_backends.backends
    if BACKEND_NAME not in known:
        known[BACKEND_NAME] = triton_backends.Backend(
            compiler=InterpreterCompiler, driver=InterpreterDriver
        )
