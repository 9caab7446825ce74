"""Workers that build the tree runner; vLLM finds them through ``worker_cls``."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_mtp import compat
from vllm_mtp.config import SettingsError


def _require_v2(worker: Any) -> None:
    if not worker.use_v2_model_runner:
        raise SettingsError(
            "mtp_tree: vLLM chose its V1 model runner, which has no seam for it. Unset "
            "VLLM_USE_V2_MODEL_RUNNER, remove the feature that vLLM's log names as "
            "unsupported by V2, and on a CPU set TRITON_INTERPRET=1."
        )


class TreeWorker(Worker):  # type: ignore[misc]
    """vLLM's GPU worker with the tree runner."""

    def init_device(self) -> None:
        from vllm_mtp.attention.base import register_tree_backends

        _require_v2(self)
        register_tree_backends()
        super().init_device()

    def _make_model_runner(self) -> Any:
        from vllm_mtp.runner import TreeModelRunner

        return TreeModelRunner(self.vllm_config, self.device)


class TreeCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with the tree runner; kernels run in Triton's interpreter."""

    def init_device(self) -> None:
        from vllm_mtp.attention.base import register_tree_backends
        from vllm_mtp.runner import TreeCPUModelRunner

        _require_v2(self)
        compat.use_torch_top_k_top_p()
        register_tree_backends()
        with compat.swap_cpu_runner(TreeCPUModelRunner):
            super().init_device()
