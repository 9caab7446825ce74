"""Moving along the accepted path, byte for byte, against the twin."""

import numpy as np
import pytest
import torch

from tests.helpers.trees import DEVICE, assert_same
from vllm_mtp.kernels.kv_commit import build_kv_table, commit_kv, commit_rows
from vllm_mtp.reference.kv_commit import commit_kv as plain_commit_kv
from vllm_mtp.reference.kv_commit import commit_rows as plain_commit_rows

BLOCK_SIZE = 4
NUM_BLOCKS = 24


class Batch:
    """Random accepted paths of ragged requests, and slots scattered over blocks."""

    def __init__(self, lengths, seed=0, num_groups=1, num_rows=8):
        rng = np.random.default_rng(seed)
        self.path = torch.arange(num_rows).int().repeat(len(lengths), 1)
        counts = []
        for r, length in enumerate(lengths):
            accepted = int(rng.integers(0, min(length, 5))) if length > 1 else 0
            rows = np.sort(rng.choice(np.arange(1, max(length, 2)), accepted, False))
            self.path[r, 1 : 1 + accepted] = torch.from_numpy(rows).int()
            counts.append(1 + accepted)
        self.num_accepted = torch.tensor(counts, dtype=torch.int32)
        self.query_start_loc = torch.from_numpy(np.cumsum([0, *lengths])).int()
        num_tokens = sum(lengths)
        slots = [
            rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[: num_tokens + 2]
            for _ in range(num_groups)
        ]
        self.slot_mappings = torch.from_numpy(np.stack(slots))
        self.num_tokens = num_tokens

    def rows(self):
        """(path, num_accepted, query_start_loc)."""
        return self.path, self.num_accepted, self.query_start_loc


def random_cache(*inner, dtype=torch.uint8, seed=0):
    """A cache of random bytes, every bit pattern included."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, *inner)
    rng = np.random.default_rng(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def as_bytes(tensor):
    return tensor.contiguous().cpu().view(torch.uint8)


def check(caches, groups, batch):
    """Commit with kernel and twin; the caches have to end up with the same bytes."""
    before = [as_bytes(cache).clone() for cache in caches]
    plain = [cache.contiguous().cpu().clone() for cache in caches]
    layout = build_kv_table(caches, groups)
    commit_kv(
        layout,
        batch.slot_mappings.to(DEVICE),
        *(tensor.to(DEVICE) for tensor in batch.rows()),
    )
    plain_commit_kv(plain, groups, batch.slot_mappings, *batch.rows())
    for found, expected, old in zip(caches, plain, before, strict=True):
        assert_same(as_bytes(found), as_bytes(expected))
        assert not torch.equal(as_bytes(found), old)
    return layout


@pytest.mark.parametrize("seed", range(3))
def test_mixed_layers(seed):
    """Catches: one row size, dtype or group for all layers; words wider than a row.

    656 bytes is fp8_ds_mla with its scales inline, 132 the indexer's key and scale.
    """
    caches = [
        random_cache(576, dtype=torch.bfloat16, seed=seed).to(DEVICE),
        random_cache(656, seed=seed + 1).to(DEVICE),
        random_cache(132, seed=seed + 2).to(DEVICE),
        random_cache(64, dtype=torch.float8_e4m3fn, seed=seed + 3).to(DEVICE),
    ]
    batch = Batch([8, 1, 5, 8, 3], seed=seed + 4, num_groups=2)
    layout = check(caches, [0, 0, 1, 1], batch)
    assert layout.word_bytes == 4


def test_row_of_odd_bytes():
    """Catches: words over the end of a row, into the next token's."""
    layout = check([random_cache(13).to(DEVICE)], [0], Batch([8, 8]))
    assert layout.word_bytes == 1


def test_long_rows_are_sliced():
    """Catches: bytes past the first slice of a row left behind."""
    layout = check([random_cache(5000).to(DEVICE)], [0], Batch([8, 8]))
    assert layout.max_row_words * layout.word_bytes == 5000


def test_strided_caches():
    """Catches: blocks or rows taken for contiguous; heads stored outside of tokens."""
    padded = random_cache(40, dtype=torch.bfloat16).to(DEVICE)[::2, :, 8:]
    heads_first = random_cache(2, 16, dtype=torch.float16, seed=1).to(DEVICE)
    heads_first = heads_first.transpose(1, 2).contiguous().transpose(1, 2)
    batch = Batch([6, 6])
    batch.slot_mappings %= NUM_BLOCKS * BLOCK_SIZE // 2
    batch.slot_mappings[0, :12] = torch.randperm(NUM_BLOCKS * BLOCK_SIZE // 2)[:12]
    layout = check([padded, heads_first], [0, 0], batch)
    assert layout.table.shape[0] == 3


def test_shared_cache_moves_once():
    """Catches: two programs moving the same rows, one after the other had begun."""
    cache = random_cache(32).to(DEVICE)
    layout = build_kv_table([cache, cache], [0, 0])
    assert layout.table.shape[0] == 1


def test_overlapping_path():
    """Catches: a row overwritten before it was read: 1 <- 2, 2 <- 3, 3 <- 5."""
    batch = Batch([8])
    batch.path[0, 1:4] = torch.tensor([2, 3, 5])
    batch.num_accepted[0] = 4
    check([random_cache(600).to(DEVICE)], [0], batch)


def test_missing_slots_stay():
    """Catches: slot -1 read or written as the last row of the cache."""
    batch = Batch([8, 8], seed=1)
    batch.path[0, 1:3] = torch.tensor([3, 5])
    batch.num_accepted[0] = 3
    batch.slot_mappings[0, 2] = -1
    batch.slot_mappings[0, 11:13] = -1
    check([random_cache(16).to(DEVICE)], [0], batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden_size", [7, 1500])
def test_rows_move(dtype, hidden_size):
    """Catches: ids overwritten before read, positions of rejected rows changed."""
    batch = Batch([8, 1, 5, 8, 2], seed=2)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(batch.num_tokens, hidden_size + 5, generator=generator)
    ids = torch.arange(batch.num_tokens).int() * 3
    positions = torch.randint(0, 90, (batch.num_tokens,), generator=generator)
    plain = [wide.to(dtype)[:, :hidden_size], ids.clone(), positions.clone()]
    found = [wide.to(DEVICE, dtype, copy=True)[:, :hidden_size]]
    found += [ids.to(DEVICE, copy=True), positions.to(DEVICE, copy=True)]
    commit_rows(*(tensor.to(DEVICE) for tensor in batch.rows()), *found)
    plain_commit_rows(*batch.rows(), *plain)
    for tensor, expected in zip(found, plain, strict=True):
        assert_same(tensor, expected)
    assert not torch.equal(plain[1], ids)


def test_wrong_calls_are_refused():
    """Catches: too few slot mappings for the groups of the layers."""
    cache = random_cache(16).to(DEVICE)
    layout = build_kv_table([cache], [1])
    batch = Batch([4])
    with pytest.raises(ValueError, match="slot_mappings: shape"):
        commit_kv(
            layout,
            batch.slot_mappings.to(DEVICE),
            *(tensor.to(DEVICE) for tensor in batch.rows()),
        )
    with pytest.raises(ValueError, match="empty"):
        build_kv_table([], [])
