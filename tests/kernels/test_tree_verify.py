"""The accepted walk, against the twin and an oracle that does not walk."""

import numpy as np
import pytest
import torch

from tests.helpers.trees import (
    DEVICE,
    POISON,
    assert_same,
    assert_same_buffers,
    chain_tree,
    copy_buffers,
    poisoned_buffers,
    random_tree,
    star_tree,
    store_tree,
    walk_oracle,
)
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels.tree_verify import verify_tree
from vllm_mtp.reference.tree_verify import verify_tree as plain_verify
from vllm_mtp.tree.layout import EXAMPLE


def check(shape, requests):
    """``requests``: (slot, tree or None, drafted tokens, sampled tokens) of each.

    Compares kernel, twin and oracle; returns (path, emitted) of each request.
    """
    num_reqs, num_rows = len(requests), shape.num_rows
    buffers = poisoned_buffers(shape, num_reqs + 1)
    for slot, tree, _, _ in requests:
        if tree is not None:
            store_tree(buffers, slot, tree)
    drafted = torch.tensor([t for r in requests for t in r[2]], dtype=torch.int64)
    sampled = torch.tensor([t for r in requests for t in r[3]], dtype=torch.int64)
    cu_num_logits = np.cumsum([0, *(len(r[2]) for r in requests)])
    idx_mapping = torch.tensor([r[0] for r in requests])
    args = [sampled, drafted, idx_mapping, torch.from_numpy(cu_num_logits).int()]
    emitted = torch.full((num_reqs + 1, num_rows), POISON)
    counts = torch.full((num_reqs + 1,), POISON, dtype=torch.int32)
    plain_emitted, plain_counts = emitted.clone(), counts.clone()
    emitted, counts = emitted.to(DEVICE), counts.to(DEVICE)
    twin = copy_buffers(buffers)
    verify_tree(buffers, *(arg.to(DEVICE) for arg in args), emitted, counts)
    plain_verify(twin, *args, plain_emitted, plain_counts)
    assert_same_buffers(buffers, twin)
    assert_same(emitted, plain_emitted, "emitted")
    assert_same(counts, plain_counts, "num_emitted")
    results = []
    for r, (_, tree, drafts, draws) in enumerate(requests):
        count = int(counts[r])
        found = buffers.path[r, :count].tolist(), emitted[r, :count].tolist()
        if tree is not None:
            assert found == walk_oracle(tree.parents, drafts, draws)
        assert buffers.path[r, count:].tolist() == list(range(count, num_rows))
        results.append(found)
    return results


@pytest.mark.parametrize("num_rows", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_random_trees(num_rows, seed):
    """Catches: siblings with one token, a walk into another branch, ragged rows."""
    rng = np.random.default_rng(seed)
    alphabet = 1 + seed
    requests = []
    for slot in (3, 0, 2, 1):
        tree = random_tree(rng, num_rows, alphabet)
        kept = int(rng.integers(1, num_rows + 1))
        drafted = [t if rng.random() > 0.1 else -1 for t in tree.tokens[:kept]]
        sampled = rng.integers(0, alphabet, kept).tolist()
        requests.append((slot, tree, drafted, sampled))
    check(TreeShape(16, 4, num_rows - 1), requests)


def test_example_path():
    """Catches: any change of what the docs draw: a, d, g accepted, 9 drawn after g."""
    drafted = list(EXAMPLE.tokens)
    sampled = [101, 103, 0, 106, 0, 0, 9]
    (result,) = check(TreeShape(3, 4, 6), [(0, EXAMPLE, drafted, sampled)])
    assert result == ([0, 1, 3, 6], [101, 103, 106, 9])


def test_whole_chain_and_full_fan_out():
    """Catches: the last row of a chain not accepted; the last sibling not looked at."""
    chain, star = chain_tree(8), star_tree(8)
    results = check(
        TreeShape(7, 3, 7),
        [
            (0, chain, list(range(8)), [*range(1, 8), 5]),
            (1, star, list(range(8)), [7, *([9] * 6), 4]),
        ],
    )
    assert results[0] == (list(range(8)), [*range(1, 8), 5])
    assert results[1] == ([0, 7], [7, 4])


def test_equal_siblings_take_the_lowest_row():
    """Catches: the highest of equal siblings taken, or both."""
    star = star_tree(4)
    (result,) = check(TreeShape(3, 4, 3), [(0, star, [0, 5, 6, 6], [6, 1, 2, 3])])
    assert result == ([0, 2], [6, 2])


def test_placeholders_and_padding_are_never_accepted():
    """Catches: a negative draft equal to a negative draw; a padded row as a child."""
    shape = TreeShape(3, 4, 3)
    star = star_tree(4)
    requests = [
        (0, star, [0, -1, -1, -1], [-1, 1, 2, 3]),
        (1, star, [0, -1, 5, -1], [5, 1, 2, 3]),
    ]
    results = check(shape, requests)
    assert results == [([0], [-1]), ([0, 2], [5, 2])]
    padded = star_tree(4).__class__(tokens=(0, 5, 5, 5), parents=(-1, -1, 0, -1))
    (result,) = check(shape, [(0, padded, [0, 5, 5, 5], [5, 1, 2, 5])])
    assert result == ([0, 2], [5, 2])


def test_root_only_idle_and_empty_rows():
    """Catches: an idle row following slot -1; a request without rows emitting."""
    results = check(
        TreeShape(3, 4, 3),
        [
            (0, star_tree(4), [7], [3]),
            (-1, None, [0, 3, 3, 3], [3, 3, 3, 3]),
            (1, None, [], []),
        ],
    )
    assert results == [([0], [3]), ([0], [3]), ([], [])]
