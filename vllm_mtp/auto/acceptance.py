"""Expected accept length of every rung, from what the running rung accepts.

A draft is described by two numbers: ``p``, the chance that the best child of a node is
what the target draws, and ``decay``, the factor by which ``p`` changes per depth. Later
children share what is left, each ``TAIL`` times as likely as the one before. So every
node of the EAGLE-2 tree has a probability, and a rung's accept length is one plus the
sum over its N best nodes. ``p`` follows the accept length just seen, ``decay`` the
depths that were reached; what the model misses between two rungs is learned as a factor
whenever both are used.
"""

import bisect
from collections.abc import Sequence
from functools import lru_cache

from vllm_mtp.auto.ladder import Rung

TAIL = 0.45
"""Odds of a child against the sibling before it; a round figure, not a fit."""

P_GRID = tuple(0.02 * i for i in range(1, 50))
DECAY_GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)

TYPICAL_DECAY, DECAY_DOUBT = 1.0, 0.3
"""Shallow trees say little of ``decay``: how much an estimate far from the typical one
counts against it, in the squared error of the depths seen."""

MEMORY = 384.0
"""Verified trees that an estimate remembers (exponentially)."""

VISIT = 256
"""Trees after a change of rung that tell how wrong the model is between the two."""

SAME = 0.05
"""Change of the batch, relatively, up to which its text is taken to be the same."""

FACTOR_SPREAD = 0.06
"""How wrong, relatively, the model may be between two rungs before anything is seen."""

DRIFT = 0.003
"""What a visit to another rung adds to that, as texts change."""

NOISE = 1.2
"""Standard deviation of the nodes one tree has accepted."""

SPREAD = 0.8
"""The same between requests, of what their trees have accepted on average: what was
expected comes from others too."""

FACTOR_RANGE = (0.75, 1.33)

SHARING, CERTAIN = {2: 0.2, 3: 0.2, 5: 0.07}, (0.47, 0.27)
"""How many more nodes a batch accepts that shares its N nodes a request, at the ``p``
of greedy text; nothing at that of noise, and between them along a line. From traced
trees (benchmarks/shared_budget.py); what it really is, serving tells."""

FADE = 0.98
"""Of a factor at each visit, so that all together cannot wander off."""

STALE = 16.0
"""Trees that an estimate is worth after a time without drafts."""


def tree_acceptance(rung: Rung, topk: int, p: float, decay: float) -> list[float]:
    """Chance that depth 1, 2, ... S is reached; the accept length is one plus the sum.

    Args:
        rung: Size of the tree.
        topk: Children of every expanded node.
        p: Chance of the best child at depth 1.
        decay: Factor of ``p`` from one depth to the next.
    """

    def children(depth: int) -> list[float]:
        best = min(p * decay ** (depth - 1), 0.995)
        rest = (1 - best) * (1 - TAIL)
        return [best] + [min(best, rest * TAIL**j) for j in range(topk - 1)]

    nodes: list[tuple[float, int]] = []
    frontier = [1.0]
    for depth in range(1, rung.num_steps + 1):
        shares = children(depth)
        level = sorted((n * share for n in frontier for share in shares), reverse=True)
        nodes += [(chance, -depth) for chance in level]
        frontier = level[: rung.frontier]
    reached = [0.0] * rung.num_steps
    # Of equal nodes the one nearer to the root, its parent.
    for chance, depth in sorted(nodes, reverse=True)[: rung.num_nodes]:
        reached[-depth - 1] += chance
    if rung.is_shared:
        certainty = max((p - CERTAIN[0]) / CERTAIN[1], 0.0)
        more = 1 + SHARING.get(rung.num_nodes, 0.0) * certainty
        reached = [min(chance * more, 0.995) for chance in reached]
    return reached


@lru_cache(maxsize=4)
def _table(ladder: tuple[Rung, ...], topk: int) -> list[list[list[list[float]]]]:
    """``tree_acceptance`` by rung, decay and ``p``; never changed."""
    return [
        [
            [tree_acceptance(rung, topk, p, decay) for p in P_GRID]
            for decay in DECAY_GRID
        ]
        for rung in ladder
    ]


class AcceptanceModel:
    """Learns from every verified tree; predicts for every rung."""

    def __init__(self, ladder: Sequence[Rung], topk: int) -> None:
        self.ladder = ladder
        # [rung][decay][p]: chance of each depth
        self.reached = _table(tuple(ladder), topk)
        # The same, summed: nodes accepted
        self.accepts = [
            [[sum(depths) for depths in row] for row in rows] for rows in self.reached
        ]
        self.factors = [1.0] * len(ladder)
        self.spreads = [FACTOR_SPREAD] * len(ladder)
        # The drafter.
        self.p, self.decay = 0.6, 0.9
        # Trees remembered, as if all were of the rung in use, and how many of them
        # reached each depth.
        self.rung = 0
        self.steps = 0
        self.trees = STALE
        self.depths: list[float] = []
        # The first trees of the rung in use, and what was expected of them.
        self.visit_trees = self.visit_accepted = 0
        self.expected = 0.0
        # No comparison for the rung in use, since nothing was known before or it is
        # done; nothing known of the text.
        self.is_learned = self.is_stale = True
        # Trees of the last step, and of the first one of the rung in use.
        self.batch = self.visit_batch = 0

    def observe(self, rung: int, accepted: Sequence[int]) -> None:
        """Take in one step: the nodes that each verified tree had accepted."""
        if rung == 0:
            # What was known of the text grows old.
            self.is_stale = True
        if rung == 0 or not accepted:
            return
        batch = len(accepted)
        if rung != self.rung or self.is_stale:
            self._learn_factor()
            self._enter(rung)
            self.is_learned |= not _is_close(batch, self.batch)
            self.visit_batch = batch
        # Other requests, other text: those that are hard to guess stay for longest.
        self.is_learned |= not _is_close(batch, self.visit_batch)
        self.batch = batch
        if self.visit_trees < VISIT:
            self.visit_trees += len(accepted)
            self.visit_accepted += sum(accepted)
            if self.visit_trees >= VISIT:
                self._learn_factor()
        keep = max(0.0, 1 - len(accepted) / MEMORY)
        self.trees = self.trees * keep + len(accepted)
        for index in range(len(self.depths)):
            reached = sum(count > index for count in accepted)
            self.depths[index] = self.depths[index] * keep + reached
        self._fit()

    def predict(self, rung: int) -> float:
        """Tokens a request emits in a step with this rung, the extra token included."""
        if rung == 0:
            return 1.0
        return 1 + self._accepts(rung, self.decay, self.p) * self.factors[rung]

    def _enter(self, rung: int) -> None:
        """Go on with another rung, and what is known of the drafter in its terms."""
        if self.is_stale:
            self.trees = min(self.trees, STALE)
        self.rung = rung
        self.expected = self.predict(rung) - 1
        self.visit_trees = self.visit_accepted = 0
        self.is_learned, self.is_stale = self.is_stale, False
        depths = self._depths(rung)
        scale = self.trees * self.expected / max(sum(depths), 1e-6)
        self.depths = [scale * chance for chance in depths]

    def _fit(self) -> None:
        """Find the ``p`` and ``decay`` that explain the running rung."""
        wanted = sum(self.depths) / self.trees / self.factors[self.rung]
        self.steps += 1
        if len(self.depths) > 1 and self.trees >= 64 and self.steps % 8 == 0:
            # The dear part, and slow to change.
            self.decay += 0.5 * (self._find_decay(wanted) - self.decay)
        self.p = self._invert(self.rung, self.decay, wanted)

    def _find_decay(self, accepts: float) -> float:
        """The likeliest decay, given the accept length and the depths seen."""
        seen = [count / self.trees for count in self.depths]
        scale = max(sum(seen), 1e-3)
        errors = []
        for index, decay in enumerate(DECAY_GRID):
            p = self._invert(self.rung, decay, accepts)
            at = min(max(round(p / P_GRID[0]) - 1, 0), len(P_GRID) - 1)
            depths = self.reached[self.rung][index][at]
            total = max(sum(depths), 1e-3)
            pairs = zip(depths, seen, strict=True)
            misfit = sum((a / total - b / scale) ** 2 for a, b in pairs)
            errors.append(misfit + DECAY_DOUBT * (decay - TYPICAL_DECAY) ** 2)
        best = min(range(len(errors)), key=errors.__getitem__)
        if best in (0, len(errors) - 1):
            return DECAY_GRID[best]
        # The lowest point of the parabola through three neighbours.
        left, middle, right = errors[best - 1 : best + 2]
        bend = left - 2 * middle + right
        shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
        return DECAY_GRID[best] + shift * (DECAY_GRID[best + 1] - DECAY_GRID[best])

    def _depths(self, rung: int) -> list[float]:
        """Chance of each depth at the nearest point of the table."""
        index, share = _between(DECAY_GRID, self.decay)
        at = min(max(round(self.p / P_GRID[0]) - 1, 0), len(P_GRID) - 1)
        return self.reached[rung][index + round(share)][at]

    def _accepts(self, rung: int, decay: float, p: float) -> float:
        """Nodes accepted, between the points of the table."""
        at = min(max(p / P_GRID[0] - 1, 0.0), len(P_GRID) - 1.001)
        low = int(at)
        index, share = _between(DECAY_GRID, decay)
        first, second = (
            row[low] + (at - low) * (row[low + 1] - row[low])
            for row in self.accepts[rung][index : index + 2]
        )
        return first + share * (second - first)

    def _invert(self, rung: int, decay: float, accepts: float) -> float:
        """The ``p`` that accepts so many nodes."""
        low, high = P_GRID[0], P_GRID[-1]
        for _ in range(12):
            middle = (low + high) / 2
            if self._accepts(rung, decay, middle) < accepts:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _learn_factor(self) -> None:
        """Compare the first trees of the running rung with what was expected then.

        Later ones don't count: by then the text may have changed.
        """
        rung, expected, trees = self.rung, self.expected, self.visit_trees
        if trees == 0 or expected <= 0 or self.is_learned:
            return
        self.is_learned = True
        seen = self.visit_accepted / trees
        noise = (NOISE**2 / trees + SPREAD**2 / self.visit_batch) ** 0.5
        noise /= max(expected, 0.2)
        spread = self.spreads[rung] + DRIFT
        gain = spread**2 / (spread**2 + noise**2)
        self.spreads[rung] = spread * (1 - gain) ** 0.5
        low, high = FACTOR_RANGE
        known = 1 + FADE * (self.factors[rung] - 1)
        wanted = known * (1 + gain * (seen / expected - 1))
        self.factors[rung] = min(max(wanted, low), high)


def _is_close(batch: int, other: int) -> bool:
    """Whether the requests of two steps can be taken to be the same."""
    return abs(batch - other) <= SAME * other


def _between(grid: Sequence[float], value: float) -> tuple[int, float]:
    """Index of the point before ``value``, and the way to the next one, 0 to 1."""
    value = min(max(value, grid[0]), grid[-1])
    index = min(bisect.bisect_right(grid, value) - 1, len(grid) - 2)
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])
