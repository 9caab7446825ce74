"""Chooses the rung of the next step: the most tokens per second, without flapping."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_mtp.auto.acceptance import AcceptanceModel
from vllm_mtp.auto.costs import CostModel
from vllm_mtp.auto.ladder import SHARED_FROM, Rung

DECIDE_EVERY, DECIDE_TREES = 8, 64
"""Steps between two decisions while the batch stays about the same, or fewer that
verify so many trees: of a large batch, one step tells that its text is another."""

GAIN = 1.015
"""A rung must promise this much more than the one in use."""

PROBE_EVERY = 400
"""Steps between two looks at another rung."""

PROBE_STEPS = 5
PROBE_WORTH = 0.95
"""Only rungs that promise this share of the best are looked at ..."""

UNKNOWN_WORTH = 0.6
"""... or this share, as long as their steps were not timed while serving."""

DOUBT = 0.03
"""Looks are eight times as frequent while a promising rung's accept length is known
less exactly than this, relatively."""

KNOWN_STEPS = 6.0
"""Steps after which a cost that was not measured at start-up counts as known."""

REST = 1 << 20


@dataclass
class Choice:
    """A decision and its reasons, for logs and metrics."""

    rung: int
    accept_length: float
    step_ms: float


class Policy:
    """The state machine; one call a step."""

    def __init__(
        self, ladder: Sequence[Rung], acceptance: AcceptanceModel, costs: CostModel
    ) -> None:
        self.ladder, self.acceptance, self.costs = ladder, acceptance, costs
        self.current = 0
        self.decided_batch = 0
        self.steps = 0
        self.next_decision = 0
        self.next_probe = PROBE_EVERY // 4
        self.last_probe = 0
        # The smallest batch since then, and how soon a larger one is a reason to look.
        self.least_batch = REST
        self.patience = PROBE_EVERY // 8
        self.probing: int | None = None
        self.probe_ends = 0
        self.last_used = [-REST] * len(ladder)
        self.num_switches = 0
        self.choice = Choice(0, 1.0, 0.0)
        # Whether every request may verify nodes of its own number.
        self.may_share = True

    def rate(self, rung: int, batch: int, context: int) -> float:
        """Tokens per millisecond promised for the whole batch; 0: not for this one."""
        if self.ladder[rung].is_shared and not self._may_share(batch):
            return 0.0
        length = self.acceptance.predict(rung)
        return batch * length / self.costs.predict(rung, batch, context)

    def _may_share(self, batch: int) -> bool:
        """Without measured costs there is enough to learn about equal trees."""
        return self.may_share and self.costs.is_measured and batch >= SHARED_FROM

    def choose(self, batch: int, context: int) -> int:
        """The rung to draft in this step, for a batch of decoding requests."""
        self.steps += 1
        if batch <= 0:
            return self.current
        if self.probing is not None:
            if self.steps < self.probe_ends:
                return self.probing
            self.probing = None
            self.next_decision = 0
        moved = abs(batch - self.decided_batch) > 0.15 * self.decided_batch
        if self.steps >= self.next_decision or moved:
            self._decide(batch, context)
        self.least_batch = min(self.least_batch, batch)
        if self.current == 0 and batch >= 2 * self.least_batch:
            # What is known of the text comes from few of these requests.
            self.next_probe = min(self.next_probe, self.last_probe + self.patience)
        if self.steps >= self.next_probe:
            self._probe(batch, context)
        chosen = self.current if self.probing is None else self.probing
        self.last_used[chosen] = self.steps
        return chosen

    def _decide(self, batch: int, context: int) -> None:
        rates = [self.rate(r, batch, context) for r in range(len(self.ladder))]
        best = max(range(len(rates)), key=rates.__getitem__)
        first = self.decided_batch == 0
        if best != self.current and (first or rates[best] > GAIN * rates[self.current]):
            self.current = best
            self.num_switches += 1
        self.decided_batch = batch
        wait = min(DECIDE_EVERY, DECIDE_TREES // batch)
        self.next_decision = self.steps + max(wait, 1)
        self.choice = Choice(
            self.current,
            self.acceptance.predict(self.current),
            self.costs.predict(self.current, batch, context),
        )

    def _probe(self, batch: int, context: int) -> None:
        """Spend a few steps on the promising rung that was not used for longest."""
        rates = [self.rate(r, batch, context) for r in range(len(self.ladder))]
        # Batches that grow and shrink are no reason again and again.
        is_early = self.current == 0 and self.steps < self.last_probe + PROBE_EVERY
        longer = min(2 * self.patience, PROBE_EVERY)
        self.patience = longer if is_early else PROBE_EVERY // 8
        self.next_probe = self.steps + PROBE_EVERY
        self.last_probe, self.least_batch = self.steps, batch
        if self.current == 0:
            # Has drafting begun to pay? The rung that comes closest tells.
            self.probing = max(range(1, len(rates)), key=rates.__getitem__)
            self.probe_ends = self.steps + PROBE_STEPS
            if not self._is_known(self.probing):
                self._look_soon()
            return
        others = [
            r
            for r in range(len(rates))
            if r != self.current and self._is_promising(r, rates)
        ]
        if not others:
            return
        self.probing = min(others, key=lambda r: (self.last_used[r], -rates[r]))
        self.probe_ends = self.steps + PROBE_STEPS
        if any(not self._is_known(r) or self._doubt(r) > DOUBT for r in others):
            self._look_soon()

    def _look_soon(self) -> None:
        """Look at another rung after an eighth of the usual time."""
        self.next_probe = self.steps + PROBE_EVERY // 8

    def _is_promising(self, rung: int, rates: Sequence[float]) -> bool:
        """Whether a rung may be the best, as far as is known."""
        if rung == 0:
            # What a step without drafts costs decides whether any of it pays; known
            # once, there is nothing more to see.
            return not self._is_known(0)
        if not self._is_known(rung):
            return rates[rung] >= UNKNOWN_WORTH * max(rates)
        worth = min(PROBE_WORTH, 1 / (1 + 1.5 * self._doubt(rung)))
        return rates[rung] >= worth * max(rates)

    def _doubt(self, rung: int) -> float:
        return self.acceptance.spreads[rung]

    def _is_known(self, rung: int) -> bool:
        return self.costs.is_measured or self.costs.weights[rung] >= KNOWN_STEPS
