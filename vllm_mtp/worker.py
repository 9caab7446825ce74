"""The worker that builds the tree runner; vLLM finds it through ``worker_cls``."""

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_mtp import compat
from vllm_mtp.attention.base import TREE_BACKENDS, set_state
from vllm_mtp.config import SettingsError


def require_v2(worker: Any) -> None:
    """Raise ``SettingsError`` when vLLM chose its V1 model runner."""
    if not worker.use_v2_model_runner:
        raise SettingsError(
            "mtp_tree: vLLM chose its V1 model runner, which has no seam for it. Unset "
            "VLLM_USE_V2_MODEL_RUNNER, and remove the feature that vLLM's log names as "
            "unsupported by V2."
        )


if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Upstream
else:
    _Upstream = object


class TreeWorkerMixin(_Upstream):  # type: ignore[misc]
    """Tree-aware attention backends for as long as the worker lives."""

    def init_device(self) -> None:
        require_v2(self)
        compat.install_backends(TREE_BACKENDS)
        super().init_device()

    def shutdown(self) -> None:
        super().shutdown()
        compat.remove_backends(TREE_BACKENDS)
        set_state(None)


class TreeWorker(TreeWorkerMixin, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with the tree runner."""

    def _make_model_runner(self) -> Any:
        from vllm_mtp.runner import TreeModelRunner

        return TreeModelRunner(self.vllm_config, self.device)
