"""Expansion level by level, against the twin, from poisoned buffers."""

import numpy as np
import pytest
import torch

from tests.helpers.trees import (
    DEVICE,
    assert_same,
    assert_same_buffers,
    copy_buffers,
    poisoned_buffers,
)
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels.tree_expand import expand_tree
from vllm_mtp.reference.tree_expand import expand_tree as plain_expand

SHAPES = [
    TreeShape(1, 1, 1),
    TreeShape(4, 1, 3),
    TreeShape(2, 2, 6),
    TreeShape(3, 4, 7),
    TreeShape(5, 3, 9),
    TreeShape(5, 8, 63),
    TreeShape(16, 4, 63),
    TreeShape(3, 32, 63),
    TreeShape(5, 3, 9, 1),
    TreeShape(5, 4, 9, 2),
    TreeShape(5, 4, 9, 3),
    TreeShape(16, 32, 63, 4),
]


def name_of(shape):
    return f"S{shape.num_steps}k{shape.topk}F{shape.frontier}"


def draw_children(rng, buffers, logprobs=(-0.5, -1.0, -1.5, -2.0)):
    """Fill ``topk_*`` with few distinct values, so that many scores are equal."""
    shape = buffers.topk_ids.shape
    ids = torch.from_numpy(rng.integers(0, 1000, shape))
    values = torch.from_numpy(rng.choice(np.float32(logprobs), shape))
    buffers.topk_ids.copy_(ids)
    buffers.topk_logprobs.copy_(values.sort(dim=1, descending=True).values)


def check_levels(
    shape,
    slots,
    seed=0,
    chain_slots=(),
    logprobs=None,
    hidden_size=40,
    frontier=None,
):
    """Run all levels with kernel and twin; returns the buffers after the last."""
    rng = np.random.default_rng(seed)
    num_reqs, width = len(slots), frontier or shape.frontier
    buffers = poisoned_buffers(shape, num_reqs)
    for slot in chain_slots:
        buffers.chain_only[slot] = True
    idx_mapping = torch.tensor(slots, device=DEVICE)
    for depth in range(1, shape.num_steps + 1):
        draw_children(rng, buffers, *([logprobs] if logprobs else []))
        rows_in = num_reqs if depth == 1 else num_reqs * width
        hidden_in = torch.randn(rows_in, hidden_size).to(DEVICE)
        hidden_out = torch.full((num_reqs * width + 1, hidden_size), float("nan"))
        hidden_out = hidden_out.to(DEVICE)
        input_ids = torch.full((num_reqs * width + 1,), -7, dtype=torch.int32)
        input_ids = input_ids.to(DEVICE)
        twin = copy_buffers(buffers)
        plain_hidden, plain_ids = hidden_out.clone().cpu(), input_ids.clone().cpu()
        given = () if frontier is None else (frontier,)
        expand_tree(
            buffers, depth, idx_mapping, hidden_in, hidden_out, input_ids, *given
        )
        plain_expand(
            twin,
            depth,
            idx_mapping.cpu(),
            hidden_in.cpu(),
            plain_hidden,
            plain_ids,
            *given,
        )
        assert_same_buffers(buffers, twin)
        assert_same(hidden_out, plain_hidden, "hidden_out")
        assert_same(input_ids, plain_ids, "input_ids")
    return buffers


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_agrees_with_twin(shape):
    """Catches: unstable ties, wrong candidate numbering, bit 63 of the scratch mask."""
    check_levels(shape, slots=[1, 0])


@pytest.mark.parametrize(("topk", "widest"), [(3, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("frontier", [1, 2])
def test_fewer_nodes_expanded_than_there_is_room_for(topk, widest, frontier):
    """Catches: rows of a request found by the buffers' width and not by that of the
    level; requests idle, unordered and drafting chains among the others."""
    shape = TreeShape(5, topk, 9, widest)
    for seed in range(2):
        buffers = check_levels(
            shape,
            slots=[3, -1, 0, 2],
            seed=seed,
            chain_slots=[0],
            frontier=frontier,
        )
        found = topk + 4 * frontier * topk
        finite = buffers.cand_scores.isfinite().sum(dim=1).tolist()
        assert finite[0] == finite[1] == finite[3] == found
        assert finite[2] == 5


def test_a_frontier_of_one_is_a_path():
    """By counting, for kernel and twin alike: every level hangs below the best child
    of the level before, which sees itself and all of them."""
    shape = TreeShape(5, 3, 9, 2)
    buffers = poisoned_buffers(shape, 2)
    slots = torch.tensor([1, 0], device=DEVICE)
    hidden, other = torch.zeros(2, 2, 8, device=DEVICE)
    ids = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for depth in range(1, 6):
        buffers.topk_ids[:2] = torch.tensor([[7, 8, 9], [4, 5, 6]]) + 10 * depth
        falling = torch.tensor([-1.0, -2.0, -3.0], device=DEVICE)
        buffers.topk_logprobs[:2] = falling
        expand_tree(buffers, depth, slots, hidden, other, ids, 1)
        if depth < 5:
            assert ids.tolist() == [7 + 10 * depth, 4 + 10 * depth]
            assert buffers.scratch_masks[:2].tolist() == [2**depth - 1] * 2
    parents = [-1] * 3 + [0] * 3 + [3] * 3 + [6] * 3 + [9] * 3
    assert buffers.cand_parents[:, :15].tolist() == [parents] * 2
    scores = [-depth - child for depth in range(1, 6) for child in range(3)]
    assert buffers.cand_scores[:, :15].tolist() == [scores] * 2
    assert buffers.cand_scores[:, 15:].isnan().all()


def test_last_level_leaves_frontier():
    """Catches: the frontier replaced after the last level."""
    shape = TreeShape(2, 2, 6)
    buffers = check_levels(shape, slots=[0])
    assert (buffers.frontier < 2).all()


def test_chain_only_request_keeps_one_child():
    """Catches: chain_only read by batch row instead of slot; idle rows as chains."""
    buffers = check_levels(TreeShape(3, 3, 7), slots=[2, -1, 1], chain_slots=[2])
    finite = buffers.cand_scores.isfinite().sum(dim=1).tolist()
    assert finite[0] < finite[1] == finite[2] == buffers.shape.num_candidates


def test_nan_and_minus_infinity():
    """Catches: NaN above everything; -inf confused with a candidate already taken."""
    logprobs = (float("nan"), float("-inf"), -1.0)
    for seed in range(3):
        check_levels(TreeShape(3, 4, 7), [0, 1], seed=seed, logprobs=logprobs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_rows_are_copied_bit_for_bit(dtype):
    """Catches: a hidden size that is no multiple of the block; strides ignored."""
    shape, hidden_size = TreeShape(2, 2, 6), 2500
    buffers = poisoned_buffers(shape, 2)
    draw_children(np.random.default_rng(0), buffers)
    wide = torch.randn(2, hidden_size + 8).to(DEVICE, dtype)
    out = torch.zeros(5, hidden_size + 3, device=DEVICE, dtype=dtype)
    ids = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 1], device=DEVICE)
    expand_tree(buffers, 1, slots, wide[:, 8:], out[:, 3:], ids)
    assert_same(out[:4, 3:], wide[[0, 0, 1, 1], 8:])
    assert (out[4] == 0).all()
    assert (out[:, :3] == 0).all()


def test_wrong_calls_are_refused():
    """Catches: hidden states read while they are overwritten; depth 0 as a level."""
    buffers = poisoned_buffers(TreeShape(2, 2, 6), 2)
    hidden = torch.zeros(4, 8, device=DEVICE)
    other = torch.zeros(4, 8, device=DEVICE)
    ids = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(ValueError, match="other memory"):
        expand_tree(buffers, 1, slots, hidden, hidden, ids)
    with pytest.raises(ValueError, match="depth: 0, expected 1 to 2"):
        expand_tree(buffers, 0, slots, hidden, other, ids)
    narrow = poisoned_buffers(TreeShape(2, 3, 6, 2), 2)
    for wrong in (0, -1, 3):
        words = f"frontier: {wrong}, expected 1 to 2"
        with pytest.raises(ValueError, match=words):
            expand_tree(narrow, 1, slots, hidden, other, ids, wrong)
    with pytest.raises(ValueError, match="hidden_out: dtype"):
        expand_tree(buffers, 1, slots, hidden, other.half(), ids)
