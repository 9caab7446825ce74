"""Tree attention against its plain twin: poisoned caches, ragged batches, 64 rows."""

import itertools

import numpy as np
import pytest
import torch

from tests.helpers.attention_case import (
    DTYPES,
    LATENT,
    PADDED,
    ROPE,
    TOLERANCE,
    AttentionCase,
    randn,
)
from tests.helpers.trees import DEVICE, chain_tree, random_tree, star_tree
from vllm_mtp.kernels.paged_tree_attention import (
    NARROW,
    WIDE,
    paged_tree_attention,
)
from vllm_mtp.kernels.split_kv import choose_num_splits
from vllm_mtp.kernels.tree_attention import tree_suffix_attention
from vllm_mtp.reference import tree_attention as plain
from vllm_mtp.tree.layout import EXAMPLE

RNG = np.random.default_rng(5)

CASES = {
    "root_only": ([chain_tree(1)] * 3, [33, 1, 64]),
    "chain": ([chain_tree(8)] * 2, [40, 97]),
    "full_fan_out": ([star_tree(8)] * 2, [17, 100]),
    "example": ([EXAMPLE] * 2, [63, 65]),
    "rows_64": ([random_tree(RNG, 64, 9), chain_tree(64)], [30, 5]),
    "ragged": ([EXAMPLE, chain_tree(1), star_tree(5), chain_tree(8)], [70, 3, 16, 200]),
    "zero_prefix": ([EXAMPLE, chain_tree(3), star_tree(4)], [0, 50, 0]),
    "padded": ([EXAMPLE, star_tree(7), PADDED, PADDED], [48, 20, 0, 0]),
}
each_case = pytest.mark.parametrize("name", CASES)
each_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda d: str(d).split(".")[1]
)


@each_dtype
@each_case
def test_suffix_mla(name, dtype):
    """Catches: bit 63 lost, masks of another request, unwritten rows, a wrong slot."""
    case = AttentionCase(*CASES[name], dtype)
    out = torch.full_like(case.prefix()[0], float("nan"))
    case.check(case.suffix(*case.prefix(), out=out))


@each_dtype
@pytest.mark.parametrize("splits", [1, 3])
@each_case
def test_paged(name, splits, dtype):
    """Catches: a split's tail read, the suffix counted twice, empty splits merged."""
    case = AttentionCase(*CASES[name], dtype, page=64)
    case.check(case.paged(num_splits=splits, suffix_part=False))
    case.check(case.paged(num_splits=splits, suffix_part=True))


SHAPES = {
    "narrow": (64, NARROW),
    "narrow_page_below_tile": (16, NARROW),
    "wide": (64, WIDE),
    "wide_page_below_tile": (16, WIDE),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_paged_tile_shapes(shape):
    """Every tile shape that ``choose_config`` may pick computes the same."""
    page, config = SHAPES[shape]
    case = AttentionCase(*CASES["ragged"], DTYPES[0], page=page)
    case.check(case.paged(num_splits=2, suffix_part=True, config=config))
    case.check(case.paged(num_splits=2, config=config))


def test_strided_cache():
    """Catches: addresses from shapes instead of strides (hybrid cache layouts)."""
    case = AttentionCase(*CASES["ragged"], DTYPES[0], pad_blocks=16)
    assert case.cache.stride(0) > case.page * case.cache.stride(1)
    case.check(case.suffix(*case.prefix()))
    case.check(case.paged(num_splits=2))


def test_causal_masks():
    """Without masks every row sees the rows up to itself."""
    case = AttentionCase(*CASES["ragged"], DTYPES[0])
    starts = case.starts.tolist()
    local = [i for a, b in itertools.pairwise(starts) for i in range(b - a)]
    masks = torch.tensor([(2 << i) - 1 for i in local])
    expected = case.expected(masks)
    case.check(case.suffix(*case.prefix(), masks=None), expected)
    case.check(case.paged(masks=None), expected)


def test_in_place_and_log_sum_exp_layouts():
    """FlashAttention's [H, rows] and FlashMLA's [reqs, H, rows], merged in place."""
    case = AttentionCase([EXAMPLE] * 3, [40, 0, 9], DTYPES[0])
    out, lse = case.prefix()
    transposed = lse.T.contiguous().T
    by_request = lse.view(3, case.max_rows, case.heads).transpose(1, 2).contiguous()
    for layout in (lse, transposed, by_request):
        merged = out.clone()
        assert case.suffix(merged, layout, out=merged) is merged
        case.check(merged)


@pytest.mark.parametrize("empty", [float("inf"), float("nan"), 3.0])
def test_empty_prefix_may_hold_anything(empty):
    """Backends disagree on what they write for a request without a prefix."""
    case = AttentionCase(*CASES["zero_prefix"], DTYPES[0])
    out, lse = case.prefix()
    rows = len(EXAMPLE.parents)
    out[:rows], lse[:rows] = float("nan"), empty
    out[-4:], lse[-4:] = float("nan"), empty
    case.check(case.suffix(out, lse, prefix_lens=case.prefix_lens))


def test_unseen_slots_are_never_read():
    """Slots of clear bits may hold NaN, -1 or numbers far outside the cache.

    Catches: a mask applied to scores only (0 * NaN in the values), and loads that are
    masked per tile instead of per slot.
    """
    case = AttentionCase([EXAMPLE], [20], DTYPES[0])
    expected = case.expected()
    out, lse = case.prefix()
    # Row 2 is seen by rows 2 and 5 only.
    seen = [r for r in range(7) if not (EXAMPLE.masks[r] >> 2) & 1]
    poisoned = case.cache.clone()
    slot = int(case.slots[2])
    poisoned[slot // case.page, slot % case.page] = float("nan")
    found = case.suffix(out, lse, cache=poisoned).float().cpu()
    torch.testing.assert_close(found[seen], expected[seen], **TOLERANCE[case.dtype])
    assert found[[2, 5]].isnan().all()
    masks = case.masks & ~(1 << 6)
    expected = case.expected(masks)
    for absurd in (-1, 2**40):
        slots = case.slots.clone()
        slots[6] = absurd
        case.check(case.suffix(out, lse, masks=masks, slots=slots), expected)


def test_draft_level_reads_scratch_rows():
    """k rows a request over more scratch rows, of which later levels are unwritten."""
    k, num_rows, num_reqs = 2, 6, 3
    case = AttentionCase([chain_tree(k)] * num_reqs, [30, 0, 45], DTYPES[0])
    scratch = torch.full((1, 64, LATENT + ROPE), float("nan"), device=DEVICE)
    scratch = scratch.to(case.dtype)
    for r in range(num_reqs):
        scratch[0, r * num_rows : r * num_rows + 4] = randn(4, LATENT + ROPE)
    # Level 1: rows 2 and 3, below row 0 and row 1.
    masks = torch.tensor([0b0101, 0b1010] * num_reqs, device=DEVICE)
    starts = torch.arange(num_reqs, dtype=torch.int32, device=DEVICE) * num_rows
    slots = torch.arange(num_reqs * num_rows, device=DEVICE)
    out, lse = case.prefix()
    keys = scratch.float().cpu().flatten(0, 1).unsqueeze(1)
    expected = plain.tree_suffix_attention(
        case.query.float().cpu(),
        keys,
        keys[..., :LATENT],
        case.starts.cpu(),
        masks.cpu(),
        starts.cpu(),
        slots.cpu(),
        num_rows,
        out.float().cpu(),
        lse.cpu(),
        case.scale,
    )
    args = (case.starts, masks, starts, slots, num_rows)
    found = tree_suffix_attention(
        case.split_query,
        scratch,
        scratch[..., :LATENT],
        *args,
        out,
        lse,
        case.scale,
        max_query_len=k,
    )
    case.check(found, expected)
    found = paged_tree_attention(
        case.split_query,
        case.cache,
        case.block_table,
        case.prefix_lens,
        *args,
        case.scale,
        max_query_len=k,
        max_prefix_len=64,
        suffix_cache=scratch,
    )
    case.check(found, expected)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 5, 8])
def test_suffix_gqa(group, head_dim):
    """Separate values, several KV heads, groups that are no power of two."""
    dtype = DTYPES[0]
    case = AttentionCase(*CASES["ragged"], dtype)
    num_rows, kv_heads = case.query.shape[0], 2
    query = randn(num_rows, kv_heads * group, head_dim, dtype=dtype)
    shape = (case.cache.shape[0] * case.page, kv_heads, head_dim)
    key, value = (
        torch.full(shape, float("nan"), device=DEVICE).to(dtype) for _ in "kv"
    )
    key[case.slots] = randn(num_rows, kv_heads, head_dim, dtype=dtype)
    value[case.slots] = randn(num_rows, kv_heads, head_dim, dtype=dtype)
    out = randn(num_rows, kv_heads * group, head_dim, dtype=dtype)
    lse = randn(num_rows, kv_heads * group) + 2
    rest = (case.starts, case.masks, case.starts[:-1], case.slots)
    expected = plain.tree_suffix_attention(
        *(t.float().cpu() for t in (query, key, value)),
        *(t.cpu() for t in rest),
        8,
        out.float().cpu(),
        lse.cpu(),
        head_dim**-0.5,
    )
    paged = (case.cache.shape[0], case.page, kv_heads, head_dim)
    for keys, values in ((key, value), (key.view(paged), value.view(paged))):
        found = tree_suffix_attention(
            query,
            keys,
            values,
            *rest,
            8,
            out,
            lse,
            head_dim**-0.5,
            max_query_len=case.max_rows,
        )
        case.check(found, expected)


def test_fp8_cache():
    """FP8 rows and their scale, in both kernels."""
    case = AttentionCase(*CASES["ragged"], torch.bfloat16)
    k_scale = torch.tensor([0.5], device=DEVICE)
    fp8 = (case.cache.float() / k_scale).to(torch.float8_e4m3fn)
    case.cache = fp8.float() * k_scale
    expected, (out, lse) = case.expected(), case.prefix()
    case.cache = fp8
    case.check(case.suffix(out, lse, k_scale=k_scale), expected)
    case.check(case.paged(num_splits=2, k_scale=k_scale), expected)


@pytest.mark.parametrize("slots", [4, 132])
def test_num_splits_stay_in_bounds(slots):
    """Partial results are bounded: about one program per SM, tens of MB."""
    for programs in (1, 2, 7, 32, 100, 128, 1024):
        for length in (0, 1, 1000, 12_288, 163_840):
            splits = choose_num_splits(programs, length, slots)
            assert 1 <= splits <= max(4, slots)
            assert programs * splits <= max(4 * programs, slots)


def test_wrong_calls_get_words():
    """Shapes that the kernels cannot read are refused before the launch."""
    case = AttentionCase(*CASES["example"], DTYPES[0])
    out, lse = case.prefix()
    with pytest.raises(ValueError, match="query is"):
        case.suffix(out, lse, query=(case.query[..., :LATENT], case.query[..., :8]))
    with pytest.raises(ValueError, match=r"prefix_out is"):
        case.suffix(out[:, :2], lse)
    case.max_rows = 65
    with pytest.raises(ValueError, match="1 to 64"):
        case.suffix(out, lse)
    with pytest.raises(ValueError, match="1 to 64"):
        case.paged()
