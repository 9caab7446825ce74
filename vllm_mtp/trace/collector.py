"""From the tensors of a verify pass to the trace's host arrays, without a sync."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.metrics.timing import PhaseTimer
from vllm_mtp.trace.settings import TraceSettings
from vllm_mtp.trace.writer import TraceWriter, TreeStep


class TreeCollector:
    """Copies sampled verify passes to the host and hands them to the writer."""

    def __init__(self, settings: TraceSettings, vllm_config: Any) -> None:
        from vllm_mtp import __version__, compat

        model = vllm_config.model_config
        decode = None
        if settings.text and not model.skip_tokenizer_init:
            decode = _token_decoder(model.tokenizer)
        self.writer = TraceWriter(
            settings,
            str(model.served_model_name or model.model),
            compat.read_config(vllm_config).to_dict(),
            {"vllm": str(compat.vllm_version()), "vllm_mtp": __version__},
            decode=decode,
        )
        self.step = 0
        # Set by the runner: times of the pass and of the drafting before it.
        self.timer: PhaseTimer | None = None

    def add_requests(self, new_requests: Any) -> None:
        """Offer the prompts of new requests."""
        for new in new_requests:
            self.writer.prompt(new.req_id, new.prompt_token_ids or ())

    def collect(
        self,
        tree: TreeBuffers,
        input_batch: Any,
        # [num_logits] tokens fed and drawn, by logits row
        fed: torch.Tensor,
        drawn: torch.Tensor,
        # [num_reqs] int32; 0 for a prefilling request
        num_emitted: torch.Tensor,
    ) -> None:
        """Record this pass if it is sampled. Call before the next draft is packed."""
        self.step += 1
        if not self.writer.wants(self.step):
            return
        slots = input_batch.idx_mapping
        roots = input_batch.logits_indices[input_batch.cu_num_logits[:-1].long()]
        arrays, wait = _copy_to_host(
            {
                "parents": tree.parents[slots],
                "depths": tree.depths[slots],
                "scores": tree.scores[slots],
                "path": tree.path[: input_batch.num_reqs],
                "num_emitted": num_emitted,
                "positions": input_batch.positions[roots],
                "fed": fed,
                "drawn": drawn,
                "starts": input_batch.cu_num_logits,
            }
        )
        step, req_ids = self.step, list(input_batch.req_ids)
        times = [
            self.timer.last_ms(phase) if self.timer is not None else _no_time
            for phase in ("drafting", "verifying")
        ]

        def finish() -> TreeStep:
            wait()
            draft_ms, verify_ms = (time() for time in times)
            host: dict[str, Any] = {n: tensor.numpy() for n, tensor in arrays.items()}
            width, starts = host["parents"].shape[1], host.pop("starts")
            return TreeStep(
                step=step,
                request_ids=req_ids,
                num_rows=np.diff(starts),
                tokens=_by_request(host.pop("fed"), starts, width),
                drawn=_by_request(host.pop("drawn"), starts, width),
                draft_ms=draft_ms,
                verify_ms=verify_ms,
                **host,
            )

        self.writer.write(finish)


def _no_time() -> float | None:
    return None


def _copy_to_host(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Start copies into memory of their own; returns it and how to wait for it."""
    copies = {}
    on_gpu = False
    for name, tensor in tensors.items():
        on_gpu = tensor.is_cuda
        copy = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu
        )
        copies[name] = copy.copy_(tensor, non_blocking=True)
    if not on_gpu:
        return copies, lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copies, event.synchronize


def _by_request(flat: Any, starts: Any, width: int) -> Any:
    """Logits rows as ``[num_reqs, width]``, zero where a request has fewer."""
    rows = np.zeros((len(starts) - 1, width), dtype=np.int64)
    for r, (start, end) in enumerate(itertools.pairwise(starts)):
        rows[r, : end - start] = flat[start:end]
    return rows


def _token_decoder(tokenizer: str) -> Callable[[int], str]:
    from vllm_mtp.trace.writer import token_decoder

    return token_decoder(tokenizer)
