"""vLLM's schedulers, counting what trees cost. What they schedule is unchanged.

vLLM calls what ``SchedulerConfig.scheduler_cls`` names, in the engine's process:
``build_scheduler`` makes the one that vLLM would have chosen, with counts, and for
``"shape": "auto"`` with the policy (``auto/scheduler.py``).
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_mtp import compat
from vllm_mtp.auto.ladder import ladder_of, nodes_of_step, rung_of, shared_nodes
from vllm_mtp.metrics.counts import note_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Upstream
else:
    _Upstream = object


class TreeSchedulerMixin(_Upstream):  # type: ignore[misc]
    """Counts nodes, widths, steps without drafts and phases (``metrics/counts.py``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = compat.read_config(self.vllm_config)
        self.tree_shape = config.shape
        self.tree_counts: Counter[str] = Counter()
        self._note = note_of(config.shape.topk, rung_of(config.shape))
        self._chains: set[str] = set()
        # Nodes drafted -> depth, where trees have several sizes.
        ladder = ladder_of(self.vllm_config, config) if config.auto else ()
        self._depths = {rung.num_drafts: rung.num_steps for rung in ladder}
        self._shared = shared_nodes(ladder)
        # Of the pass at hand: what a request verified on average; 0: all its drafts.
        self._share = 0
        self._depth = config.shape.num_steps
        # Drafts that the pass scheduled last asks its drafter for.
        self._drafts_asked = self.num_spec_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        output.mtp_drafts_asked = self._drafts_asked
        if output.num_scheduled_tokens:
            self._drafts_asked = output.num_spec_tokens_to_schedule
        return output

    def update_from_output(self, scheduler_output: Any, runner_output: Any) -> Any:
        if self.log_stats:
            asked = scheduler_output.mtp_drafts_asked
            self._depth = self._depths.get(asked, self.tree_shape.num_steps)
            self._share = nodes_of_step(self._shared, scheduler_output)
            self._note = compat.take_pass_note(runner_output) or self._note
            if self._note.new_chains:
                self._chains &= self.requests.keys()
                self._chains.update(self._note.new_chains)
            for phase, time_us in self._note.phase_us.items():
                self.tree_counts[f"phase_microseconds/{phase}"] += time_us
            self._count_pass(scheduler_output, runner_output)
        return super().update_from_output(scheduler_output, runner_output)

    def make_spec_decoding_stats(self, stats: Any, **step: Any) -> Any:
        """Called for each step of a request that had drafts and whose output counts."""
        if self.log_stats:
            request = self.requests[step["request_id"]]
            # What this one verified of a shared number, only the worker knows.
            nodes = step["num_draft_tokens"]
            nodes = min(nodes, self._share or nodes)
            if self._is_chain(request):
                nodes = min(nodes, self._depth)
            self.tree_counts["nodes_verified"] += nodes
            self._count_drafting(request)
        return super().make_spec_decoding_stats(stats, **step)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.tree_counts:
            compat.send_counts(stats, self.tree_counts)
            self.tree_counts.clear()
        return stats

    def _count_pass(self, scheduled: Any, output: Any) -> None:
        """Before vLLM's update: the steps without drafts, and the width of the pass."""
        drafts = scheduled.scheduled_spec_decode_tokens
        decoding = bool(drafts)
        for req_id in scheduled.num_scheduled_tokens.keys() - drafts.keys():
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or _is_dropped(request):
                continue
            tokens = output.sampled_token_ids
            if not tokens or not tokens[output.req_id_to_index[req_id]]:
                continue  # A part of a prompt.
            reason = self._why_no_drafts(request, scheduled)
            decoding |= reason != "prefill"
            self.tree_counts[f"steps_without_drafts/{reason}"] += 1
            self._count_drafting(request)
        if decoding:
            widest = self._share or max(map(len, drafts.values()), default=0)
            self.tree_counts[f"passes/{widest}"] += 1

    def _why_no_drafts(self, request: Any, scheduled: Any) -> str:
        req_id = request.request_id
        if (
            scheduled.num_scheduled_tokens[req_id] > 1
            or request.num_output_tokens == 0
            or req_id in scheduled.scheduled_cached_reqs.resumed_req_ids
        ):
            return "prefill"
        if scheduled.mtp_drafts_asked == 0:
            return "policy"
        # The step in flight may have been taken to emit its whole path.
        in_flight = self.num_spec_tokens + 1
        if self.max_model_len - request.num_tokens <= 1 + in_flight:
            return "max_model_len"
        return "grammar" if request.use_structured_output else "token_budget"

    def _is_chain(self, request: Any) -> bool:
        return request.request_id in self._chains

    def _count_drafting(self, request: Any) -> None:
        """What was drafted after a step of the request."""
        note = self._note
        chain = self._is_chain(request)
        nodes = note.nodes_per_chain if chain else note.nodes_per_tree
        self.tree_counts["nodes_drafted"] += nodes


class TreeScheduler(TreeSchedulerMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, counting."""


class TreeAsyncScheduler(TreeSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, counting."""


def build_scheduler(*args: Any, **kwargs: Any) -> Any:
    """The scheduler that fits ``vllm_config``; vLLM resolves this name and calls it."""
    vllm_config: Any = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if compat.read_config(vllm_config).auto:
        from vllm_mtp.auto import scheduler as auto

        chosen = (
            auto.AutoShapeAsyncScheduler if asynchronous else auto.AutoShapeScheduler
        )
    else:
        chosen = TreeAsyncScheduler if asynchronous else TreeScheduler
    return chosen(*args, **kwargs)


def _is_dropped(request: Any) -> bool:
    """Whether the output comes from before a preemption and is thrown away."""
    return bool(request.num_stale_output_tokens > 0 and request.drop_stale_output)
