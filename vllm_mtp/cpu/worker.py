"""The CPU worker that builds the tree runner; for tests and demos without a GPU."""

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (replaces torch.cuda)
from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vllm_mtp import compat
from vllm_mtp.runner import TreeRunnerMixin
from vllm_mtp.worker import TreeWorkerMixin


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):  # type: ignore[misc]
    """The CPU runner with trees."""


class TreeCPUWorker(TreeWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with the tree runner; kernels run in Triton's interpreter."""

    def init_device(self) -> None:
        with compat.swap_cpu_runner(TreeCPUModelRunner):
            super().init_device()
