"""Notices a drafter that the target never agrees with, and says so once.

Wrong weights, or a draft folder of a fine-tuned sibling, cost speed and nothing else:
the output stays right, so nobody sees it. The watch looks at totals on the host now and
then, never at the device.
"""

import logging

from vllm_mtp.config import SettingsError

logger = logging.getLogger("vllm." + __name__)

MIN_STEPS = 1000
"""Drafted steps of requests before a judgement: with a true rate of twice the limit,
fewer accepted tokens than the limit then have a chance below 1 in 1000."""

MIN_ACCEPTED_PER_STEP = 0.02
"""Accepted draft tokens per drafted step below which a drafter is useless. A trained
MTP layer has 0.5 to 0.9 at its first depth alone; random weights about one in the size
of the vocabulary."""


class AcceptanceWatch:
    """Warns once if next to no draft is accepted.

    Args:
        min_steps: drafted steps needed for a judgement, 1 or more.
        min_accepted_per_step: the rate, in tokens per step, below which it warns.
    """

    def __init__(
        self,
        min_steps: int = MIN_STEPS,
        min_accepted_per_step: float = MIN_ACCEPTED_PER_STEP,
    ) -> None:
        if min_steps < 1:
            raise SettingsError(f"min_steps={min_steps} must be 1 or more.")
        self.min_steps = min_steps
        self.min_accepted_per_step = min_accepted_per_step
        self.warned = False
        self._steps_before = 0
        self._accepted_before = 0

    def update(self, num_drafted_steps: int, num_accepted_tokens: int) -> bool:
        """Look at the totals since the start; return whether a warning was logged now.

        The rate is that of the steps since the last judgement, so a drafter that turns
        useless later, after new weights were loaded, is noticed too.

        Args:
            num_drafted_steps: verify passes of requests that had drafts, in all. Falls
                only when the counters were reset.
            num_accepted_tokens: draft tokens accepted in them; the token that each
                step emits besides is not counted.
        """
        if num_drafted_steps < self._steps_before:
            self._steps_before = self._accepted_before = 0
        steps = num_drafted_steps - self._steps_before
        if self.warned or steps < self.min_steps:
            return False
        rate = (num_accepted_tokens - self._accepted_before) / steps
        self._steps_before = num_drafted_steps
        self._accepted_before = num_accepted_tokens
        if rate >= self.min_accepted_per_step:
            return False
        self.warned = True
        logger.warning(
            "mtp_tree: the target accepts next to none of the drafts: %.4f tokens per "
            "step over %d counted steps (a matching MTP layer has 0.5 or more). The "
            "output is right, but drafting only costs time. Do the draft weights "
            "belong to this model? Run vllm-mtp inspect on the checkpoint, or remove "
            "--speculative-config.",
            rate,
            steps,
        )
        return True
