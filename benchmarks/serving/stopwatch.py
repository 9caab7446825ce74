"""Where the time of a decode step goes: parts on the GPU's and on the host's clock."""

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

PARTS = {
    "prepare": ("prepare_inputs", "runner"),
    "prepare_attn": ("prepare_attn", "runner"),
    "target": ("run_fullgraph", "runner.cudagraph_manager"),
    "head": ("compute_logits", "runner.model"),
    "verify": ("sample", "runner"),
    "commit": ("commit", "runner"),
    "draft": ("propose", "runner.speculator"),
    "draft_prefill": ("run_fullgraph", "runner.speculator.prefill_cudagraph_manager"),
    "draft_levels": ("run_fullgraph", "runner.speculator.decode_cudagraph_manager"),
    "execute_model": ("execute_model", "runner"),
    "sample_tokens": ("sample_tokens", "runner"),
}
"""Name of a part -> the method that it is, and whose.

``execute_model`` and ``sample_tokens`` are the halves of a step; ``verify`` contains
``head`` and ``commit``, ``draft`` its two graphs.
"""


class Stopwatch:
    """Wraps a runner's methods and notes when each begins and ends."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.notes: dict[str, list[tuple[float, Any, Any]]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, every call of a part is noted."""
        undo = []
        for name, (method, path) in PARTS.items():
            owner = self._find(path)
            if owner is None or not hasattr(owner, method):
                continue
            undo.append((owner, method, owner.__dict__.get(method)))
            setattr(owner, method, self._wrap(name, getattr(owner, method)))
        try:
            yield
        finally:
            for owner, method, before in undo:
                if before is None:
                    delattr(owner, method)
                else:
                    setattr(owner, method, before)

    def _find(self, path: str) -> Any:
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    def _wrap(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start = time.perf_counter()
            begin.record()
            result = call(*args, **kwargs)
            end.record()
            host = time.perf_counter() - start
            self.notes.setdefault(name, []).append((host, begin, end))
            return result

        return timed

    def report(self) -> dict[str, dict[str, float]]:
        """Median milliseconds of each part on both clocks.

        Where the host is late, ``gpu_ms`` includes the wait for it.
        """
        torch.cuda.synchronize()
        return {
            name: {
                "calls": len(notes),
                "gpu_ms": round(
                    statistics.median(b.elapsed_time(e) for _, b, e in notes), 3
                ),
                "host_ms": round(1e3 * statistics.median(h for h, _, _ in notes), 3),
            }
            for name, notes in self.notes.items()
        }


class KernelCount:
    """Profiles some steps of a running batch: kernels and busy time of a step."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self.profiler = torch.profiler.profile(activities=activities)
        self.wall = 0.0

    def observe(self, step: int) -> None:
        """To be called after each step, counted from 1."""
        if step == self.first:
            torch.cuda.synchronize()
            self.profiler.start()
            self.wall = time.perf_counter()
        elif step == self.last:
            torch.cuda.synchronize()
            self.wall = time.perf_counter() - self.wall
            self.profiler.stop()

    def report(self, top: int = 16) -> dict[str, Any]:
        """Per step: wall time, time of all kernels, their number, the ``top`` ones."""
        steps = self.last - self.first
        events = sorted(
            (e for e in self.profiler.key_averages() if e.self_device_time_total > 0),
            key=lambda e: -e.self_device_time_total,
        )
        busy = sum(event.self_device_time_total for event in events) / 1e3
        return {
            "wall_ms": round(1e3 * self.wall / steps, 3),
            "busy_ms": round(busy / steps, 3),
            "kernels": round(sum(event.count for event in events) / steps, 1),
            "top": [
                f"{event.self_device_time_total / 1e3 / steps:.4f} ms "
                f"{event.count / steps:.1f}x {event.key[:100]}"
                for event in events[:top]
            ],
        }
