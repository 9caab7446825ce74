"""The attention mixins on stand-ins for vLLM: who sees which path, what is written."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport

from vllm_mtp.attention import base
from vllm_mtp.attention.splits import PARTS_BYTES, fit_splits
from vllm_mtp.attention.state import build_attn_state
from vllm_mtp.buffers import build_tree_buffers
from vllm_mtp.config import TreeShape

SHAPE = TreeShape(num_steps=3, topk=2, num_nodes=4)
NUM_REQS, LATENT, ROPE = 3, 32, 16
CPU = torch.device("cpu")


class UpstreamBuilder:
    """As much of MLACommonMetadataBuilder as the mixin leans on."""

    query_len_support = "single"
    reorder_batch_threshold = 512

    def _init_reorder_batch_threshold(self, threshold, as_decode, _dcp=False):
        self.asked = (threshold, as_decode)
        self.reorder_batch_threshold = threshold

    def build_for_cudagraph_capture(self, common):
        return self.build(0, common)

    def build(self, _prefix, common, _fast=False):
        return SimpleNamespace(
            num_decodes=len(common.seq_lens),
            num_decode_tokens=int(common.query_start_loc[-1]),
            decode=SimpleNamespace(seq_lens=common.seq_lens),
        )


class VarlenBuilder(base.TreeBuilderMixin, UpstreamBuilder):
    """Of a backend that runs short prefills on its decode path upstream."""

    query_len_support = QueryLenSupport.VARLEN

    def build_rest(self, metadata, common, num_reqs, num_rows):
        return None if num_reqs == metadata.num_decodes else (num_reqs, num_rows)


class Builder(base.TreeBuilderMixin, UpstreamBuilder):
    pass


class UpstreamImpl:
    """Records the calls that reach upstream."""

    kv_lora_rank, qk_rope_head_dim, scale = LATENT, ROPE, 0.25

    def __init__(self):
        self.writes, self.stock_calls = [], 0

    def do_kv_cache_update(self, kv, pe, cache, slots, *args):
        self.writes.append((cache, slots.clone(), args))
        cache.flatten(0, 1)[slots] = torch.cat((kv, pe.squeeze(1)), -1)

    def forward_mqa(self, q, kv_cache, metadata, layer):
        self.stock_calls += 1
        return "stock", None


class Impl(base.TreeImplMixin, UpstreamImpl):
    def forward_prefix(self, q_nope, q_pe, kv_cache, tree, metadata, layer):
        lse = torch.full(q_nope.shape[:2], float("-inf"))
        return torch.zeros_like(q_nope), lse


@dataclass
class Metadata:
    decode: Any


@pytest.fixture
def state():
    buffers = build_tree_buffers(SHAPE, NUM_REQS, 64, CPU)
    made = build_attn_state(buffers, NUM_REQS, CPU)
    base.set_state(made)
    yield made
    base.set_state(None)


def common(rows, seq_lens):
    """CommonAttentionMetadata of a batch; zero rows are padding."""
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        max_query_len=max(rows),
        max_seq_len=max(seq_lens),
        slot_mapping=torch.arange(int(starts[-1])) + 100,
    )


def make_builder(role="verify"):
    builder = Builder()
    builder._init_reorder_batch_threshold(512, False)
    builder.tree_role = role
    return builder


def test_threshold_is_lowered_to_the_widest_tree_pass(state):
    """Where upstream's decode path takes no mix, longer requests are prefills."""
    assert make_builder().reorder_batch_threshold == SHAPE.num_rows
    assert make_builder().asked == (1, True)
    base.set_state(None)
    assert make_builder().reorder_batch_threshold == 512


def test_short_prefills_stay_where_upstream_runs_them(state):
    """Otherwise their KV rounds unlike a run without trees; they sit behind these."""
    builder = VarlenBuilder()
    builder._init_reorder_batch_threshold(512, False)
    assert builder.reorder_batch_threshold == 512
    state.verify_active = True
    tree = builder.build(0, common([5, 5, 3], [45, 12, 3])).decode.tree
    assert tree.rest is None
    assert tree.max_query_len == 5
    tree = builder.build(0, common([5, 3, 40], [45, 12, 90])).decode.tree
    assert tree.rest == (2, 8)
    assert (len(tree.prefix_lens), len(tree.row_masks)) == (2, 8)
    assert tree.max_query_len == 5
    assert tree.max_suffix == SHAPE.num_rows
    tree = builder.build(0, common([6, 40, 3], [6, 90, 3])).decode.tree
    assert tree.rest == (0, 0)


@pytest.mark.parametrize("behind", [[], [40]], ids=["alone", "before_a_prompt"])
def test_shared_nodes_may_be_any_requests(state, behind):
    """Catches: the host's equal shares taken for the longest query."""
    builder = VarlenBuilder()
    builder._init_reorder_batch_threshold(512, False)
    state.verify_active, state.ragged_query_len = True, 5
    batch = common([2, 2, *behind], [42, 12, *(2 * n for n in behind)])
    tree = builder.build(0, batch).decode.tree
    assert (tree.max_query_len, tree.max_suffix) == (5, 5)
    assert len(tree.row_masks) == 4


def test_rows_behind_the_trees_take_the_stock_path(state):
    """In front the tree path, behind it upstream's, in one output."""
    q = (torch.randn(5, 2, LATENT), torch.randn(5, 2, ROPE))
    tree = SimpleNamespace(
        role="verify", active=True, row_masks=torch.zeros(3), rest="rest"
    )
    metadata = Metadata(decode=SimpleNamespace(tree=tree))

    class Stock(UpstreamImpl):
        def forward_mqa(self, q, kv_cache, metadata, layer):
            assert metadata.decode == "rest"
            return q[0] - 1, None

    class Split(base.TreeImplMixin, Stock):
        def forward_tree(self, q, kv_cache, tree, metadata, layer):
            return q[0] + 1

    out, _ = Split().forward_mqa(q, None, metadata, SimpleNamespace())
    torch.testing.assert_close(out, torch.cat((q[0][:3] + 1, q[0][3:] - 1)))


def test_verify_metadata(state):
    """Prefix lengths end at the root; padded requests have none."""
    state.verify_active = True
    batch = common([5, 2, 0], [45, 12, 0])
    tree = make_builder().build(0, batch).decode.tree
    assert tree.active
    assert tree.role == "verify"
    assert tree.prefix_lens.tolist() == [40, 10, 0]
    assert tree.prefix_lens.data_ptr() == state.prefix_lens.data_ptr()
    assert tree.row_masks.data_ptr() == state.buffers.row_masks.data_ptr()
    assert tree.suffix_start.tolist() == [0, 5, 7]
    assert tree.suffix_slots is batch.slot_mapping
    assert tree.max_suffix == SHAPE.num_rows


def test_draft_metadata(state):
    """A draft level's rows are not in the paged cache, so the prefix is everything."""
    tree = make_builder("draft").build(0, common([2, 2, 2], [40, 10, 3])).decode.tree
    assert tree.active
    assert tree.prefix_lens.tolist() == [40, 10, 3]
    assert tree.suffix_start.tolist() == [0, 4, 8]
    assert tree.max_suffix == SHAPE.num_scratch_rows == 4
    assert len(tree.row_masks) == 6


def test_passes_without_drafts_stay_upstreams(state):
    """Off by default, on in captures of several rows, off in captures of one."""
    builder = make_builder()
    assert not hasattr(builder.build(0, common([1], [9])).decode, "tree")
    captured = builder.build_for_cudagraph_capture(common([5], [9]))
    assert captured.decode.tree.active
    captured = builder.build_for_cudagraph_capture(common([1], [9]))
    assert not hasattr(captured.decode, "tree")
    base.set_state(None)
    captured = builder.build_for_cudagraph_capture(common([5], [9]))
    assert not hasattr(captured.decode, "tree")


def test_always_attached_metadata_is_inactive(state):
    """Backends that serve the causal path themselves get the rows described."""
    builder = make_builder()
    builder.attach_always = True
    assert not builder.build(0, common([1], [9])).decode.tree.active


@pytest.mark.parametrize(
    ("role", "is_draft_layer", "active", "stock"),
    [
        ("verify", False, True, False),
        ("verify", True, True, True),
        ("verify", False, False, True),
        ("draft", True, True, False),
    ],
    ids=["target", "draft_prefill", "no_drafts", "draft_level"],
)
def test_who_sees_the_tree(state, role, is_draft_layer, active, stock):
    """The draft prefill reuses the target's metadata and must stay causal."""
    state.verify_active = state.drafting = True
    state.frontier = SHAPE.frontier
    batch = common([2, 2, 2], [40, 10, 3])
    metadata = make_builder(role).build(0, batch)
    metadata.decode.tree.active = active
    impl = Impl()
    cache = torch.randn(8, 16, LATENT + ROPE)
    kv, pe = torch.randn(6, LATENT), torch.randn(6, 1, ROPE)
    impl.do_kv_cache_update(kv, pe, cache, torch.arange(6), "auto", None)
    q = (torch.randn(6, 2, LATENT), torch.randn(6, 2, ROPE))
    layer = SimpleNamespace(is_draft_layer=is_draft_layer)
    out, lse = impl.forward_mqa(q, cache, metadata, layer)
    assert lse is None
    assert impl.stock_calls == int(stock)
    assert (out == "stock") if stock else out.shape == (6, 2, LATENT)


def test_draft_levels_write_to_scratch(state):
    """Level l writes rows l*k.. of each request; further arguments pass through."""
    impl = Impl()
    paged = torch.zeros(2, 16, LATENT + ROPE)
    kv, pe = torch.randn(6, LATENT), torch.randn(6, 1, ROPE)
    state.drafting = True
    for level, slots in ((0, [0, 1, 4, 5, 8, 9]), (1, [2, 3, 6, 7, 10, 11])):
        state.level, state.frontier = level, 2
        impl.do_kv_cache_update(kv, pe, paged, torch.arange(6), "auto", "scale")
        cache, written, args = impl.writes[-1]
        assert written.tolist() == slots
        assert args == ("auto", "scale")
        assert cache is impl.scratch
        assert cache.dtype == paged.dtype
        assert torch.equal(cache.flatten(0, 1)[slots, :LATENT], kv)
    assert not paged.any()
    # Padding of the batch beyond the requests there can be is dropped.
    wide = (torch.randn(9, LATENT), torch.randn(9, 1, ROPE))
    impl.do_kv_cache_update(*wide, paged, torch.arange(9), "auto", None)
    assert len(impl.writes[-1][1]) == 6
    state.drafting = False
    impl.do_kv_cache_update(kv, pe, paged, torch.arange(6), "auto", None)
    assert impl.writes[-1][0] is paged


@pytest.mark.parametrize(
    "shape", [TreeShape(6, 3, 12, 2), TreeShape(5, 4, 12, 3), TreeShape(3, 4, 7)]
)
def test_every_node_has_a_slot_of_its_own(shape):
    """With every frontier that levels are drafted with; what is read is what is
    written: frontier node j of level l is row l*F + j of its request."""
    buffers = build_tree_buffers(shape, NUM_REQS, 64, CPU)
    frontiers = range(1, shape.frontier + 1)
    state = build_attn_state(buffers, NUM_REQS, CPU, frontiers)
    assert sorted(state.level_slots) == [*frontiers]
    rows = shape.num_scratch_rows
    assert len(state.scratch_slots) == NUM_REQS * rows
    for width in frontiers:
        state.frontier = width
        seen: dict[int, list[int]] = {}
        for state.level in range(shape.num_steps - 1):
            slots = state.slots_of_level(1 << 20).tolist()
            assert len(slots) == NUM_REQS * width
            for row, slot in enumerate(slots):
                seen.setdefault(row // width, []).append(slot)
            assert state.slots_of_level(2).tolist() == slots[:2]
        used = [slot for slots in seen.values() for slot in slots]
        assert len(set(used)) == len(used)
        assert {*used} <= {*state.scratch_slots.tolist()}
        for request, slots in seen.items():
            start = int(state.scratch_start[request])
            assert slots == [*range(start, start + len(slots))]
            assert len(slots) == (shape.num_steps - 1) * width <= rows


def test_slots_are_those_of_the_shape_unless_said():
    buffers = build_tree_buffers(TreeShape(4, 3, 7, 2), NUM_REQS, 64, CPU)
    assert [*build_attn_state(buffers, NUM_REQS, CPU).level_slots] == [2]


def test_level_read_before_written_says_so(state):
    """A draft layer without slot mapping would read an absent scratch cache."""
    metadata = make_builder("draft").build(0, common([2], [40]))
    q = (torch.randn(2, 2, LATENT), torch.randn(2, 2, ROPE))
    layer = SimpleNamespace(is_draft_layer=True)
    with pytest.raises(RuntimeError, match="scratch cache"):
        Impl().forward_mqa(q, torch.randn(8, 16, LATENT + ROPE), metadata, layer)


@pytest.mark.parametrize(
    ("most", "rows", "expected"),
    [
        # 16 heads: small batches keep what the user allows, large ones what fits.
        (32, 1, 32),
        (32, 512, 32),
        (32, 2048, 8),
        (32, 8192, 2),
        (32, 1 << 20, 2),
        (1, 2048, 1),
        (0, 2048, 0),
        (32, 0, 32),
    ],
)
def test_parts_of_many_rows_fit(most: int, rows: int, expected: int) -> None:
    part = rows * 16 * 512 * 4
    found = fit_splits(most, part)
    assert found == expected
    assert found * part <= max(PARTS_BYTES, 2 * part)
