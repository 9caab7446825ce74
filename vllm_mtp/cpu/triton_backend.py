"""The stub Triton backend ``cpu``: names a target and never compiles anything.

Under ``TRITON_INTERPRET=1`` Triton runs kernels as Python over CPU tensors, so neither
the compiler nor the launcher below is ever asked to work; they exist to be found.
Source: ``triton.backends.compiler.BaseBackend`` and ``triton.backends.driver.DriverBase``
of Triton 3.6 to 3.9.
"""

from types import ModuleType
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


class InterpreterCompiler(BaseBackend):
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


class InterpreterDriver(DriverBase):
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


def register_backend() -> None:
    """Make ``triton.backends.backends["cpu"]`` exist. A real one is left in place."""
    known = triton_backends.backends
    if BACKEND_NAME not in known:
        known[BACKEND_NAME] = triton_backends.Backend(
            compiler=InterpreterCompiler, driver=InterpreterDriver
        )
