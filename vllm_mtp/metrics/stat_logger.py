"""The counts of the schedulers, in Prometheus and in the log. Runs in the front end."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_mtp import compat
from vllm_mtp.metrics.counts import PHASES, PREFIX, totals

logger = logging.getLogger("vllm." + __name__)


class TreeStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """One of vLLM's stat loggers; added to its own when the method is ``mtp_tree``."""

    def __init__(
        self, vllm_config: Any, engine_indexes: list[int], counter_cls: Any
    ) -> None:
        """Register the totals, at 0.

        Args:
            vllm_config: vLLM's configuration.
            engine_indexes: engines that report here.
            counter_cls: the class of Prometheus counters that vLLM uses.
        """
        config = compat.read_config(vllm_config)
        model = vllm_config.model_config.served_model_name
        self._labels = {index: (model, str(index)) for index in engine_indexes}
        self._counters = {}
        for name, total in totals(config).items():
            label = [total.label] if total.label else []
            counter = counter_cls(
                name=PREFIX + name,
                documentation=total.help,
                labelnames=["model_name", "engine", *label],
            )
            self._counters[name] = counter
            for labels in self._labels.values():
                for value in total.values if label else (None,):
                    counter.labels(*labels, *([value] if value else []))
        self._since_log: Counter[str] = Counter()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the counts out of a step's statistics."""
        if scheduler_stats is None:
            return
        counts = compat.receive_counts(scheduler_stats)
        stats = scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._since_log["steps"] += stats.num_drafts
        for key, count in counts.items():
            self._since_log[key] += count
            name, _, value = key.partition("/")
            if name in self._counters and engine_idx in self._labels:
                labels = (*self._labels[engine_idx], *([value] if value else []))
                self._counters[name].labels(*labels).inc(count)

    def log(self) -> None:
        """One line for the interval since the last one, if there was any step."""
        line = describe(self._since_log)
        self._since_log.clear()
        if line:
            logger.info("mtp_tree metrics: %s", line)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the shape was logged when the option was understood."""


def describe(counts: Mapping[str, int]) -> str:
    """The counts of an interval in words; empty if nothing was decoded."""
    parts = []
    drafted, without = counts.get("steps", 0), _labelled(counts, "steps_without_drafts")
    if steps := drafted + sum(without.values()):
        parts.append(f"nodes drafted per step: {counts['nodes_drafted'] / steps:.1f}")
    if drafted:
        parts.append(f"verified per step: {counts['nodes_verified'] / drafted:.1f}")
    if passes := _labelled(counts, "passes"):
        widths = sorted(passes.items(), key=lambda item: int(item[0]))
        parts.append("passes by nodes: " + _list(widths))
    if without:
        what = f"steps without drafts: {sum(without.values())}"
        parts.append(f"{what} ({_list(sorted(without.items()))})")
    phases = _labelled(counts, "phase_microseconds")
    if whole := sum(phases.values()):
        shares = [(p, f"{phases.get(p, 0) / whole:.0%}") for p in PHASES]
        parts.append("time: " + _list(shares))
    return ", ".join(parts)


def _labelled(counts: Mapping[str, int], name: str) -> dict[str, int]:
    prefix = name + "/"
    found = {k.removeprefix(prefix): n for k, n in counts.items() if prefix in k}
    return {value: count for value, count in found.items() if count}


def _list(pairs: Any) -> str:
    return ", ".join(f"{name}: {value}" for name, value in pairs)
