"""Positions and masks of verify rows, against the twin, in ragged batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.trees import (
    DEVICE,
    POISON,
    assert_same,
    assert_same_buffers,
    copy_buffers,
    poisoned_buffers,
    random_tree,
    store_tree,
)
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels.tree_rows import prepare_tree_rows
from vllm_mtp.reference.tree_rows import prepare_tree_rows as plain_rows


def check(shape, requests, seed=0):
    """``requests``: (slot, query rows, logits rows, first position, prefill length).

    Returns (positions, row masks) of each request.
    """
    rng = np.random.default_rng(seed)
    num_slots = len(requests) + 1
    lengths = [request[1] for request in requests]
    buffers = poisoned_buffers(shape, num_slots, sum(lengths) + 2)
    prefill_len = torch.zeros(num_slots, dtype=torch.int32)
    for slot, _, _, _, prefill in requests:
        if slot >= 0:
            store_tree(buffers, slot, random_tree(rng, shape.num_rows, 10))
            prefill_len[slot] = prefill
    starts = np.cumsum([0, *lengths])
    positions = torch.full((sum(lengths) + 2,), POISON)
    for start, (_, length, _, base, _) in zip(starts, requests, strict=False):
        positions[start : start + length] = base + torch.arange(length)
    cu_num_logits = np.cumsum([0, *(request[2] for request in requests)])
    args = [
        torch.tensor([request[0] for request in requests]),
        torch.from_numpy(starts).int(),
        torch.from_numpy(cu_num_logits).int(),
        prefill_len,
    ]
    twin, plain_positions = copy_buffers(buffers), positions.clone()
    positions = positions.to(DEVICE)
    prepare_tree_rows(buffers, *(arg.to(DEVICE) for arg in args), positions)
    plain_rows(twin, *args, plain_positions)
    assert_same(positions, plain_positions, "positions")
    assert_same_buffers(buffers, twin)
    slices = [slice(a, b) for a, b in pairwise(starts)]
    return [(positions[s].tolist(), buffers.row_masks[s].tolist()) for s in slices]


def test_ragged_batch():
    """Catches: drafts of a prefilling request, a shortened tree, a row without drafts.

    In order: full tree, chunked prefill with placeholder drafts, prefill of 100 rows,
    shortened tree, root only, idle row, tree on the first row past its prefill, several
    rows without drafts.
    """
    results = check(
        TreeShape(3, 4, 7),
        [
            (2, 8, 8, 50, 20),
            (0, 8, 8, 5, 20),
            (1, 100, 1, 0, 120),
            (3, 5, 5, 33, 20),
            (4, 1, 1, 40, 20),
            (-1, 3, 3, 9, 0),
            (5, 8, 8, 20, 20),
            (6, 8, 1, 70, 20),
        ],
    )
    full, chunk, _, short, root, idle, first, plain = results
    assert full[0] != list(range(50, 58))
    assert chunk == (list(range(5, 13)), [(2 << row) - 1 for row in range(8)])
    assert len(short[0]) == 5
    assert root == ([40], [1])
    assert idle == ([9, 10, 11], [1, 3, 7])
    assert plain == (list(range(70, 78)), chunk[1])
    assert first[0][:2] == [20, 21]
    assert max(first[0]) < 27


@pytest.mark.parametrize("seed", range(4))
def test_64_rows(seed):
    """Catches: bit 63 lost, in a tree and in causal rows; rows past 64 touched."""
    shape = TreeShape(16, 4, 63)
    results = check(shape, [(0, 64, 64, 9, 3), (1, 70, 1, 0, 99)], seed)
    assert results[0][1][63] < 0
    assert results[1][1][63] == -1
    assert results[1][1][64:] == [POISON] * 6


def test_empty_requests():
    """Catches: the first position of a request without rows, which is another's."""
    check(TreeShape(2, 2, 6), [(0, 0, 0, 0, 0), (1, 7, 7, 9, 3), (-1, 0, 0, 0, 0)])
