"""Totals of acceptance for the watch, kept on the device and read without a sync."""

from typing import Any

import torch

from vllm_mtp.acceptance_watch import AcceptanceWatch

EVERY = 4
"""One verify pass in so many is counted: a rate needs no more."""

READ_EVERY = 64
"""Counted passes between two copies to the host."""


class AcceptanceTotals:
    """Feeds an ``AcceptanceWatch`` from sampled verify passes."""

    def __init__(self, device: torch.device) -> None:
        self.watch = AcceptanceWatch()
        pinned = device.type == "cuda"
        self._accepted = torch.zeros((), dtype=torch.int64, device=device)
        self._host = torch.zeros((), dtype=torch.int64, pin_memory=pinned)
        self._event: Any = _new_event() if pinned else None
        self._passes = 0
        self._steps = 0
        self._steps_copied: int | None = None

    def add(
        self,
        # host: requests of the pass that had drafts
        num_drafted: int,
        # [num_reqs] int32, tokens each request emitted; 0 while it is prefilling
        num_sampled: torch.Tensor,
    ) -> None:
        """Count a pass, and now and then tell the watch. Never waits for the device."""
        self._passes += 1
        if self._passes % EVERY:
            return
        self._steps += num_drafted
        self._accepted += (num_sampled - 1).clamp_(min=0).sum()
        if self._steps_copied is not None:
            self._report_copy()
        elif self._passes % (EVERY * READ_EVERY) == 0:
            self._steps_copied = self._steps
            self._host.copy_(self._accepted, non_blocking=True)
            if self._event is not None:
                self._event.record()

    def _report_copy(self) -> None:
        if self._steps_copied is None:
            return
        if self._event is not None and not self._event.query():
            return
        self.watch.update(self._steps_copied, int(self._host))
        self._steps_copied = None


def _new_event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
