"""A drafter that is never accepted is noticed; a good one is not."""

import logging

import pytest
import torch

from vllm_mtp.totals import EVERY, READ_EVERY, AcceptanceTotals


@pytest.mark.parametrize(("emitted", "warnings"), [(1, 1), (2, 0)])
def test_watch_hears_of_the_rate(
    emitted: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    totals = AcceptanceTotals(torch.device("cpu"))
    logging.getLogger("vllm").propagate = True
    # Twice as long as one judgement takes: it is made once.
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * EVERY * (READ_EVERY + 1) * 8):
            totals.add(8, torch.tensor([emitted] * 8 + [0], dtype=torch.int32))
    said = [r for r in caplog.records if "accepts next to none" in r.message]
    # One record may reach the handler twice, through vLLM's logger and the root.
    assert len({id(r) for r in said}) == warnings
