"""Chunks of the verify pass: whole requests, as many as fit."""

import pytest

from vllm_mtp.verifier import request_chunks


@pytest.mark.parametrize(
    ("starts", "limit", "chunks"),
    [
        ([0, 8], 100, [(0, 1)]),
        ([0, 8, 16, 24], 16, [(0, 2), (2, 3)]),
        ([0, 8, 16, 24], 23, [(0, 2), (2, 3)]),
        ([0, 8, 16, 24], 24, [(0, 3)]),
        # A request larger than the limit still goes through, alone.
        ([0, 8, 40, 41], 16, [(0, 1), (1, 2), (2, 3)]),
        ([0, 1, 9, 10, 18], 9, [(0, 2), (2, 4)]),
    ],
)
def test_chunks(starts: list[int], limit: int, chunks: list[tuple[int, int]]) -> None:
    assert list(request_chunks(starts, limit)) == chunks
