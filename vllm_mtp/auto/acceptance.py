"""Expected accept length of every rung, from what the running rung accepts.

A draft is described by two numbers: ``p``, the chance that the best child of a node is
what the target draws, and ``decay``, the factor by which ``p`` changes per depth. Later
children share what is left, each ``TAIL`` times as likely as the one before. So every
node of the EAGLE-2 tree has a probability, and a rung's accept length is one plus the
sum over its N best nodes. ``p`` follows the accept length just seen, ``decay`` the
share of steps whose first draft was accepted; what the model misses between two rungs
is learned as a factor whenever both are used.
"""

import bisect
import heapq
from collections.abc import Sequence

from vllm_mtp.auto.ladder import Rung

TAIL = 0.7
"""Odds of a child against the sibling before it; fitted to trees of the tiny model."""

P_GRID = tuple(0.02 * i for i in range(1, 50))
DECAY_GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)

MEMORY = 384.0
"""Verified trees that an estimate remembers (exponentially)."""

FACTOR_RANGE = (0.75, 1.33)


def tree_acceptance(
    rung: Rung, topk: int, p: float, decay: float
) -> tuple[float, float]:
    """Accept length and chance that a first draft is accepted, under the model."""
    if rung.num_nodes == 0:
        return 1.0, 0.0

    def children(depth: int) -> list[float]:
        best = min(p * decay ** (depth - 1), 0.995)
        rest = (1 - best) * (1 - TAIL)
        return [best] + [min(best, rest * TAIL**j) for j in range(topk - 1)]

    by_depth = [children(d) for d in range(1, rung.num_steps + 1)]
    heap = [(-share, 1) for share in by_depth[0]]
    heapq.heapify(heap)
    total = first = 0.0
    for _ in range(rung.num_nodes):
        if not heap:
            break
        negative, depth = heapq.heappop(heap)
        total -= negative
        if depth == 1:
            first -= negative
        if depth < rung.num_steps:
            for share in by_depth[depth]:
                heapq.heappush(heap, (negative * share, depth + 1))
    return 1.0 + total, first


class AcceptanceModel:
    """Learns from every verified tree; predicts for every rung."""

    def __init__(self, ladder: Sequence[Rung], topk: int) -> None:
        self.ladder = ladder
        # [rung][decay][p] of (accept length, first accepted)
        self.tables = [
            [
                [tree_acceptance(rung, topk, p, decay) for p in P_GRID]
                for decay in DECAY_GRID
            ]
            for rung in ladder
        ]
        self.factors = [1.0] * len(ladder)
        self.decay = DECAY_GRID.index(0.9)
        # Trees, accepted tokens and accepted first drafts of the rung in use.
        self.rung = 0
        self.trees = 0.0
        self.accepted = 0.0
        self.firsts = 0.0
        self.p = 0.6
        # What the rung before predicted, to compare a new rung with.
        self.expected: float | None = None

    def observe(self, rung: int, trees: int, accepted: int, firsts: int) -> None:
        """Take in one step: trees verified, nodes accepted, depth-1 nodes accepted."""
        if rung == 0 or trees == 0:
            return
        if rung != self.rung:
            self._leave()
            self.rung = rung
            self.trees = self.accepted = self.firsts = 0.0
            self.expected = self.predict(rung)
        keep = max(0.0, 1 - trees / MEMORY)
        self.trees = self.trees * keep + trees
        self.accepted = self.accepted * keep + accepted
        self.firsts = self.firsts * keep + firsts
        self._fit()

    def predict(self, rung: int) -> float:
        """Tokens a request emits in a step with this rung, the extra token included."""
        if rung == 0:
            return 1.0
        length = self._lookup(rung, 0)
        return 1 + (length - 1) * self.factors[rung]

    def _lookup(self, rung: int, what: int) -> float:
        row = self.tables[rung][self.decay]
        at = min(max(self.p / 0.02 - 1, 0.0), len(P_GRID) - 1.001)
        low = int(at)
        return row[low][what] + (at - low) * (row[low + 1][what] - row[low][what])

    def _fit(self) -> None:
        """Find ``p`` (and now and then ``decay``) that explain the running rung."""
        # Worth a few trees of prior: the first step says little.
        prior = 4.0
        predicted = self.predict(self.rung) - 1
        seen = (self.accepted + prior * predicted) / (self.trees + prior)
        target = 1 + seen / self.factors[self.rung]
        if self.ladder[self.rung].num_steps > 1 and self.trees >= 64:
            first = self.firsts / self.trees
            fits = []
            for index in range(len(DECAY_GRID)):
                p = self._invert(self.rung, index, target)
                at = min(max(round(p / 0.02) - 1, 0), len(P_GRID) - 1)
                wrong = abs(self.tables[self.rung][index][at][1] - first)
                # Stay unless another is clearly better.
                fits.append((wrong - 0.01 * (index == self.decay), index))
            self.decay = min(fits)[1]
        self.p = self._invert(self.rung, self.decay, target)

    def _invert(self, rung: int, decay: int, length: float) -> float:
        lengths = [pair[0] for pair in self.tables[rung][decay]]
        at = bisect.bisect_left(lengths, length)
        if at == 0:
            return P_GRID[0]
        if at == len(lengths):
            return P_GRID[-1]
        low, high = lengths[at - 1], lengths[at]
        share = (length - low) / max(high - low, 1e-9)
        return P_GRID[at - 1] + share * (P_GRID[at] - P_GRID[at - 1])

    def _leave(self) -> None:
        """Compare the rung that ends with what was expected of it when it began."""
        if self.expected is None or self.trees < 16 or self.rung == 0:
            return
        seen, expected = self.accepted / self.trees, self.expected - 1
        weight = self.trees / (self.trees + MEMORY)
        change = (max(seen, 0.01) / max(expected, 0.01)) ** (weight / 2)
        low, high = FACTOR_RANGE
        self.factors[self.rung] = min(max(self.factors[self.rung] * change, low), high)
