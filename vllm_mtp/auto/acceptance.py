"""Expected accept length of every rung, from what the running rung accepts.

A text is described by one number, ``p``: the chance that the best child of a node is
what the target draws, where text is neither easy nor hard. A third of the trees is
drafted in easier text and a third in harder, ``UNEVEN`` apart. Later children share
what is left, each ``TAIL`` times as likely as the one before. So every node of the
EAGLE-2 tree has a probability, and a rung's accept length is one plus the sum over its
N best nodes, averaged over the three. ``p`` follows the accept length just seen; what
the model misses between two rungs is learned as a factor whenever both are used.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from vllm_mtp.auto.ladder import Rung

TAIL = 0.3
"""Odds of a child against the sibling before it."""

UNEVEN = 1.06
"""Log-odds between hard, middling and easy text. With ``TAIL`` chosen on traced trees
at temperatures 0 and 1; how far the model holds there is in docs/tree.md."""

P_GRID = tuple(0.02 * i for i in range(1, 50))

MEMORY = 768.0
"""Verified trees that an estimate remembers (exponentially) ..."""

RECENT, SURPRISE = 48.0, 4.0
"""... unless the last so many differ from it by more than so many standard deviations.
Then the text has changed, and they are all that is remembered."""

VISIT = 256
"""Trees after a change of rung that tell how wrong the model is between the two."""

LOOK = 24
"""Fewer trees of another rung are a look: afterwards all goes on as before it. A batch
of few requests would otherwise spend its time comparing, blind to another text."""

SAME = 0.05
"""Change of the batch, relatively, up to which its text is taken to be the same."""

FACTOR_SPREAD = 0.02
"""How wrong, relatively, the model may be between two rungs before anything is seen."""

DRIFT = 0.001
"""What a whole visit to another rung adds to that, as texts change."""

NOISE = 1.2
"""Standard deviation of the nodes one tree has accepted."""

SPREAD = 0.8
"""The same between requests, of what their trees have accepted on average: what was
expected comes from others too."""

OTHER_TEXT = 0.05
"""How much easier or harder, relatively, the text may be during a visit than before."""

FACTOR_RANGE = (0.75, 1.33)

SHARING, CERTAIN = {2: 0.22, 3: 0.21, 5: 0.075}, (0.43, 0.34)
"""How many more nodes a batch accepts that shares its N nodes a request, at the ``p``
of greedy text and above; nothing at that of noise, and between them along a line. From
traced trees (benchmarks/shared_budget.py); what it really is, serving tells."""

FADE = 0.98
"""Of a factor at each visit, so that all together cannot wander off."""

STALE = 16.0
"""Trees that an estimate is worth after a time without drafts."""


def expected_nodes(rung: Rung, topk: int, p: float) -> float:
    """Nodes accepted on average; the accept length is one more.

    Args:
        rung: Size of the tree.
        topk: Children of every expanded node.
        p: Chance of the best child in middling text.
    """
    middle = math.log(p / (1 - p))
    chances = [1 / (1 + math.exp(-middle - shift)) for shift in (-UNEVEN, 0.0, UNEVEN)]
    nodes = sum(tree_nodes(rung, topk, chance) for chance in chances) / len(chances)
    if rung.is_shared:
        certainty = min(max((p - CERTAIN[0]) / CERTAIN[1], 0.0), 1.0)
        nodes *= 1 + SHARING.get(rung.num_nodes, 0.0) * certainty
    return min(nodes, 0.995 * rung.num_steps)


def tree_nodes(rung: Rung, topk: int, p: float) -> float:
    """The same in text where the best child of every node has the chance ``p``."""
    best = min(p, 0.995)
    rest = (1 - best) * (1 - TAIL)
    shares = [best] + [min(best, rest * TAIL**j) for j in range(topk - 1)]
    frontier, nodes = [1.0], []
    for _ in range(rung.num_steps):
        level = sorted((n * share for n in frontier for share in shares), reverse=True)
        nodes += level
        frontier = level[: rung.frontier]
    return sum(sorted(nodes, reverse=True)[: rung.num_nodes])


@lru_cache(maxsize=4)
def _table(ladder: tuple[Rung, ...], topk: int) -> list[list[float]]:
    """``expected_nodes`` by rung and ``p``; never changed."""
    return [[expected_nodes(rung, topk, p) for p in P_GRID] for rung in ladder]


class AcceptanceModel:
    """Learns from every verified tree; predicts for every rung."""

    def __init__(self, ladder: Sequence[Rung], topk: int) -> None:
        self.ladder = ladder
        # [rung][p]: nodes accepted
        self.accepts = _table(tuple(ladder), topk)
        self.factors = [1.0] * len(ladder)
        self.spreads = [FACTOR_SPREAD] * len(ladder)
        # The text.
        self.p = 0.6
        # Trees remembered, as if all were of the rung in use, and what they accepted.
        self.rung = 0
        self.trees, self.accepted = STALE, 0.0
        # The last ones of these, and as it was when the rung before was left.
        self.recent_trees = self.recent_accepted = 0.0
        self.left = (0, 0.0, 0.0)
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
        self._remember(batch, sum(accepted))
        seen = self.accepted / self.trees / self.factors[rung]
        self.p = self._invert(rung, seen)

    def _remember(self, trees: int, accepted: int) -> None:
        keep = max(0.0, 1 - trees / MEMORY)
        self.trees = self.trees * keep + trees
        self.accepted = self.accepted * keep + accepted
        window = max(RECENT, 2 * trees)
        keep = (1 - trees / window) * min(1.0, window / max(self.recent_trees, 1.0))
        self.recent_trees = self.recent_trees * keep + trees
        self.recent_accepted = self.recent_accepted * keep + accepted
        # While a rung is compared, it may be the model that is wrong.
        if self.recent_trees < RECENT / 2 or not self.is_learned:
            return
        recent = self.recent_accepted / self.recent_trees
        surprise = abs(recent - self.accepted / self.trees)
        if surprise > SURPRISE * NOISE / self.recent_trees**0.5:
            self.trees, self.accepted = self.recent_trees, self.recent_accepted

    def predict(self, rung: int) -> float:
        """Tokens a request emits in a step with this rung, the extra token included."""
        if rung == 0:
            return 1.0
        return 1 + self._accepts(rung, self.p) * self.factors[rung]

    def _enter(self, rung: int) -> None:
        """Go on with another rung, and what is known of the text in its terms."""
        if self.is_stale:
            self.trees = min(self.trees, STALE)
        before, *recent = self.left
        was_look = rung == before and self.visit_trees < LOOK and not self.is_stale
        self.left = self.rung, self.recent_trees, self.recent_accepted
        self.rung = rung
        self.expected = self.predict(rung) - 1
        self.visit_trees, self.visit_accepted = VISIT if was_look else 0, 0
        self.is_learned, self.is_stale = self.is_stale or was_look, False
        self.accepted = self.trees * self.expected
        self.recent_trees, self.recent_accepted = recent if was_look else (0.0, 0.0)

    def _accepts(self, rung: int, p: float) -> float:
        """Nodes accepted, between the points of the table."""
        at = min(max(p / P_GRID[0] - 1, 0.0), len(P_GRID) - 1.001)
        low, row = int(at), self.accepts[rung]
        return row[low] + (at - low) * (row[low + 1] - row[low])

    def _invert(self, rung: int, accepts: float) -> float:
        """The ``p`` that accepts so many nodes."""
        low, high = P_GRID[0], P_GRID[-1]
        for _ in range(12):
            middle = (low + high) / 2
            if self._accepts(rung, middle) < accepts:
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
        noise = math.hypot(noise / max(expected, 0.2), OTHER_TEXT)
        spread = self.spreads[rung] + DRIFT * min(trees / VISIT, 1.0)
        gain = spread**2 / (spread**2 + noise**2)
        self.spreads[rung] = spread * (1 - gain) ** 0.5
        low, high = FACTOR_RANGE
        known = 1 + FADE * (self.factors[rung] - 1)
        wanted = known * (1 + gain * (seen / expected - 1))
        self.factors[rung] = min(max(wanted, low), high)


def _is_close(batch: int, other: int) -> bool:
    """Whether the requests of two steps can be taken to be the same."""
    return abs(batch - other) <= SAME * other
