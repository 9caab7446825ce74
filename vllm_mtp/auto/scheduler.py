"""vLLM's scheduler, asking the policy how many nodes the next drafts shall have.

vLLM's scheduler looks up a draft count by batch size once a step
(``num_speculative_tokens_per_batch_size``); here the answer comes from the policy. The
count goes with the scheduler's output to the worker, which drafts that many in this
step, and to the next step, which verifies them; so it is always in time, with
asynchronous scheduling too.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm_mtp import compat
from vllm_mtp.auto.acceptance import AcceptanceModel
from vllm_mtp.auto.costs import CostCacheError, CostModel, CostTable, default_table
from vllm_mtp.auto.ladder import ladder_of, nodes_of_step
from vllm_mtp.auto.policy import Policy
from vllm_mtp.auto.profile import cost_key, cost_path
from vllm_mtp.scheduler import TreeAsyncScheduler, TreeScheduler

logger = logging.getLogger("vllm." + __name__)

LOG_EVERY = 30.0
"""Seconds between two log lines about the choice, while it changes."""

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Upstream
else:
    _Upstream = object


class AutoShapeMixin(_Upstream):  # type: ignore[misc]
    """Goes before a vLLM scheduler."""

    overlaps = True
    """Whether a step is scheduled and launched before the output of the one before it
    is read; if that is a prefill, the time of the one before tells nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = compat.read_config(self.vllm_config)
        ladder = ladder_of(self.vllm_config, config)
        self.rung_of = {rung.num_drafts: i for i, rung in enumerate(ladder)}
        table = self._load_costs(ladder)
        self.shape_policy = Policy(
            ladder,
            AcceptanceModel(ladder, config.shape.topk),
            CostModel(
                table or default_table(ladder), len(ladder), is_measured=bool(table)
            ),
        )
        self.dynamic_sd_lookup = self
        self.max_context = config.max_draft_context
        self._lookups = 0
        self._context = 1024
        self._last_update = 0.0
        self._last_step: tuple[int, int] | None = None
        # Its rung, requests, context and milliseconds, which count once the next step
        # only decodes.
        self._pending: tuple[int, int, int, float] | None = None
        self._logged = (0.0, -1)

    def _load_costs(self, ladder: Any) -> CostTable | None:
        key = cost_key(self.vllm_config)
        path = cost_path(key)
        try:
            return CostTable.load(path, key, ladder)
        except CostCacheError as error:
            logger.info(
                "mtp_tree: no measured step costs (%s: %s); starting from typical "
                "ones, corrected while serving.",
                path,
                error,
            )
            return None

    def __getitem__(self, num_scheduled: int) -> int:
        """Drafts of a request in a step of so many (``dynamic_sd_lookup``)."""
        policy = self.shape_policy
        if self._lookups % 8 == 0 and self.running:
            total = sum(request.num_computed_tokens for request in self.running)
            self._context = max(total // len(self.running), 1)
            # The rows of a grammar are filled in on the host.
            policy.may_share = bool(self._shared) and not any(
                request.use_structured_output for request in self.running
            )
        self._lookups += 1
        if self.max_context is not None and self._context > self.max_context:
            return 0
        rung = policy.choose(num_scheduled, self._context)
        self._log()
        # A pass that is full leaves out the last requests, step after step.
        rows = self.max_num_scheduled_tokens // max(num_scheduled, len(self.running))
        while rung and policy.ladder[rung].num_drafts >= rows:
            rung -= 1
        return policy.ladder[rung].num_drafts

    def _log(self) -> None:
        choice, now = self.shape_policy.choice, time.monotonic()
        if choice.rung == self._logged[1] or now - self._logged[0] < LOG_EVERY:
            return
        self._logged = (now, choice.rung)
        rung = self.shape_policy.ladder[choice.rung]
        logger.info(
            "mtp_tree: auto shape is now %d nodes%s, depth %d, at batch %d (expects "
            "accept length %.2f and %.1f ms a step; %d changes so far)",
            rung.num_nodes,
            " on average" if rung.is_shared else "",
            rung.num_steps,
            self.shape_policy.decided_batch,
            choice.accept_length,
            choice.step_ms,
            self.shape_policy.num_switches,
        )

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        """Tell the policy what the step accepted and how long it took."""
        self._observe(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _observe(self, scheduler_output: Any, output: Any) -> None:
        now = time.perf_counter()
        elapsed, self._last_update = now - self._last_update, now
        step, only_decodes = self._told(scheduler_output, output)
        timed = None
        if step is not None and step == self._last_step:
            timed = (*step, self._context, elapsed * 1e3)
        told = timed
        if self.overlaps:
            told = self._pending if only_decodes else None
        if told is not None:
            self.shape_policy.costs.observe(*told)
        self._last_step, self._pending = step, timed

    def _told(
        self, scheduler_output: Any, output: Any
    ) -> tuple[tuple[int, int] | None, bool]:
        """Tell what was accepted.

        Returns the rung and the requests of a step whose drafts are those of that rung
        too, and whether it only decodes.
        """
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        sampled = output.sampled_token_ids
        if not scheduled or not sampled:
            return None, False
        widths = {len(tokens) for tokens in drafts.values()}
        width = next(iter(widths)) if len(widths) == 1 else -1 if widths else 0
        rung = self.rung_of.get(width)
        shares = nodes_of_step(self._shared, scheduler_output) > 0
        if rung is None or shares != (width in self._shared):
            return None, False
        if rung == 0 and scheduler_output.num_spec_tokens_to_schedule == 0:
            self.shape_policy.acceptance.observe(0, ())
        elif rung > 0:
            index = output.req_id_to_index
            counts = [len(sampled[index[r]]) - 1 for r in drafts if r in index]
            counts = [count for count in counts if count >= 0]
            self.shape_policy.acceptance.observe(rung, counts)
        # A new request may bring a single token too, and idle time before it.
        rows = scheduler_output.total_num_scheduled_tokens
        decoding = (
            not scheduler_output.scheduled_new_reqs
            and rows == len(scheduled) * (width + 1)
            and len(drafts) == (len(scheduled) if rung else 0)
        )
        next_width = scheduler_output.num_spec_tokens_to_schedule
        alike = decoding and next_width == width
        return ((rung, len(scheduled)) if alike else None), decoding


class AutoShapeScheduler(AutoShapeMixin, TreeScheduler):  # type: ignore[misc]
    """With synchronous scheduling."""

    overlaps = False


class AutoShapeAsyncScheduler(AutoShapeMixin, TreeAsyncScheduler):  # type: ignore[misc]
    """With asynchronous scheduling."""
