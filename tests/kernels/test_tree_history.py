"""History of tree rows: kernels against their twins."""

import numpy as np
import pytest
import torch

from tests.helpers.trees import (
    DEVICE,
    assert_same,
    chain_tree,
    copy_buffers,
    poisoned_buffers,
    random_tree,
    star_tree,
)
from vllm_mtp.config import TreeShape
from vllm_mtp.kernels import tree_history as kernels
from vllm_mtp.reference import tree_history as reference
from vllm_mtp.tree.layout import EXAMPLE

VOCAB = 40
SHAPE = TreeShape(num_steps=8, topk=1, num_nodes=8)
"""Nine rows, deep enough for every tree below."""

TREES = {
    "example": EXAMPLE,
    "chain": chain_tree(9),
    "star": star_tree(9),
    "random": random_tree(np.random.default_rng(3), 9, alphabet=4),
    "root only": chain_tree(1),
}


class Case:
    """Three requests in slots 4, 0 and 2 with one tree each, the first always so."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(1)
        trees = [TREES[name], random_tree(rng, 6, alphabet=5), chain_tree(1)]
        self.buffers = poisoned_buffers(SHAPE, 5)
        slots, rows, tokens = [], [], []
        for slot, tree in zip((4, 0, 2), trees, strict=True):
            parents = torch.tensor(tree.parents, dtype=torch.int32, device=DEVICE)
            self.buffers.parents[slot, : len(parents)] = parents
            slots += [slot] * len(tree.tokens)
            rows += range(len(tree.tokens))
            tokens += [t % VOCAB for t in tree.tokens]
        self.slots = torch.tensor(slots, device=DEVICE)
        self.rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        self.tokens = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
        self.ancestors = torch.full((len(rows), 8), 99, device=DEVICE)
        kernels.gather_ancestors(
            self.buffers, self.slots, self.rows, self.tokens, self.ancestors
        )


@pytest.fixture(params=list(TREES))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def on_cpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.clone().cpu() for t in tensors]


def test_ancestors_are_the_path_without_the_root(case: Case) -> None:
    """Catches: rows before a row taken for its history (siblings are not)."""
    expected = torch.full_like(case.ancestors, 99).cpu()
    reference.gather_ancestors(
        copy_buffers(case.buffers),
        *on_cpu(case.slots, case.rows, case.tokens),
        expected,
    )
    assert_same(case.ancestors, expected)


def test_penalties_count_each_ancestor(case: Case) -> None:
    """Catches: a token drafted twice on a path counted once; siblings counted."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(case.rows), VOCAB, generator=generator).to(DEVICE)
    raw = logits.gather(1, case.ancestors.clamp(min=0))
    counts = torch.randint(0, 3, (5, VOCAB), generator=generator).int().to(DEVICE)
    penalties = [
        torch.tensor([1.3, 1.0, 1.0, 1.0, 0.7], device=DEVICE),
        torch.tensor([0.5, 0.0, 0.0, 0.0, 1.5], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.25], device=DEVICE),
    ]
    args = (raw, case.ancestors, case.slots, *penalties, counts)
    before, expected, *twin_args = on_cpu(logits, logits, *args)
    reference.penalize_ancestors(expected, *twin_args)
    kernels.penalize_ancestors(logits, *args)
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-6, atol=1e-6)
    drafted = (case.ancestors >= 0).any().item()
    assert (logits.cpu() != before).any().item() == drafted


def test_bad_words_span_output_and_ancestors(case: Case) -> None:
    """Catches: a word begun in the committed output and ended in a draft is missed."""
    path = [t for t in case.ancestors[-1].tolist() if t >= 0]
    own = case.tokens.tolist()
    words = [[own[min(1, len(own) - 1)], 7], [11, own[1 % len(own)], 8], [9], [11, 3]]
    words.append([*path[::-1][-2:], 5] if path else [11, 5])
    flat = [t for w in words for t in w]
    offsets = np.cumsum([0, *(len(w) for w in words)])
    word_tokens = torch.tensor([flat] * 5, dtype=torch.int32, device=DEVICE)
    word_offsets = torch.tensor(
        np.array([offsets] * 5), dtype=torch.int32, device=DEVICE
    )
    num_words = torch.tensor([5, 0, 2, 0, 4], dtype=torch.int32, device=DEVICE)
    history = torch.tensor([[1, 2, 10, 11]] * 5, dtype=torch.int32, device=DEVICE)
    prompt_len = torch.tensor([2] * 5, dtype=torch.int32, device=DEVICE)
    total_len = torch.tensor([4] * 5, dtype=torch.int32, device=DEVICE)
    logits = torch.zeros(len(case.rows), VOCAB, device=DEVICE)
    args = (
        case.ancestors,
        case.slots,
        word_tokens,
        word_offsets,
        num_words,
        history,
        prompt_len,
        total_len,
    )
    expected, *twin_args = on_cpu(logits, *args)
    reference.mask_bad_words(expected, *twin_args, 5)
    kernels.mask_bad_words(logits, *args, 5)
    assert_same(logits, expected)
    assert expected.isinf().any()
