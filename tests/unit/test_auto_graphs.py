"""Which CUDA graph a batch of ``"shape": "auto"`` finds."""

from types import SimpleNamespace

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)

from vllm_mtp import compat
from vllm_mtp.auto.ladder import (
    build_ladder,
    graph_batches,
    graph_sizes,
    shared_graphs,
)
from vllm_mtp.config import TreeShape

LARGEST = TreeShape(6, 3, 12, 2)
MAX_REQS = 40
LADDER = build_ladder(LARGEST, may_share=True)
WIDTHS = [rung.num_nodes + 1 for rung in LADDER if not rung.is_shared]
RAGGED = shared_graphs(LADDER, MAX_REQS)


def make_manager(*, piecewise: bool) -> SimpleNamespace:
    """What vLLM has after crossing capture sizes with query lengths."""
    sizes = graph_sizes(LADDER, MAX_REQS)
    full = {
        BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL,
            num_tokens=-(-size // width) * width,
            num_reqs=-(-size // width),
            uniform_token_count=width,
        )
        for size in sizes
        for width in WIDTHS
        if -(-size // width) <= MAX_REQS
    }
    descs = {CUDAGraphMode.FULL: sorted(full, key=lambda d: -d.num_tokens)}
    if piecewise:
        descs[CUDAGraphMode.PIECEWISE] = [
            BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None
            )
            for size in reversed(sizes)
        ]
    return SimpleNamespace(
        _capture_descs=descs,
        # As vLLM leaves them: graphs that are dropped are candidates too.
        _candidates={(size, 0): list(descs[CUDAGraphMode.FULL]) for size in sizes},
        _graphs_captured=True,
        lora_capture_cases=[0],
        _resolve_effective_loras=lambda loras: loras,
    )


def dispatch(manager: SimpleNamespace, reqs: int, width: int) -> object:
    return CudaGraphManager.dispatch(manager, reqs, reqs * width, width, 0)


@pytest.mark.parametrize("piecewise", [False, True])
def test_every_batch_and_width_has_the_next_larger_graph(piecewise: bool) -> None:
    manager = make_manager(piecewise=piecewise)
    batches = graph_batches(MAX_REQS)
    compat.keep_graphs(manager, batches)
    kept = manager._capture_descs[CUDAGraphMode.FULL]
    assert {desc.num_reqs for desc in kept} == set(batches)
    assert len(kept) == len(batches) * len(WIDTHS)
    for width in WIDTHS:
        for reqs in range(1, MAX_REQS + 1):
            desc = dispatch(manager, reqs, width)
            assert desc.cg_mode == CUDAGraphMode.FULL
            assert desc.uniform_token_count == width
            assert desc.num_reqs == min(b for b in batches if b >= reqs)


@pytest.mark.parametrize("piecewise", [False, True])
def test_batches_that_share_nodes_have_graphs_of_any_query_lengths(
    piecewise: bool,
) -> None:
    manager = make_manager(piecewise=piecewise)
    compat.keep_graphs(manager, graph_batches(MAX_REQS), RAGGED, max_query_len=9)
    kept = manager._capture_descs[CUDAGraphMode.FULL]
    assert [d for d in kept if d.max_query_len] == [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, tokens, reqs, None, 9)
        for reqs, tokens in sorted(RAGGED, key=lambda size: -size[1])
    ]
    for nodes in (2, 3, 5):
        for reqs in range(20, MAX_REQS + 1):
            rows = reqs * (nodes + 1)
            desc = CudaGraphManager.dispatch(manager, reqs, rows, None, 0, 7)
            assert desc.cg_mode == CUDAGraphMode.FULL
            assert (desc.num_tokens, desc.num_reqs) == min(
                (t, r) for r, t in RAGGED if r >= reqs and t >= rows
            )
    # Not for prefills, and not in the way of batches of equal lengths.
    desc = CudaGraphManager.dispatch(manager, 32, 96, None, 0, None)
    assert desc.max_query_len is None
    for width in WIDTHS:
        for reqs in range(1, MAX_REQS + 1):
            desc = CudaGraphManager.dispatch(
                manager, reqs, reqs * width, width, 0, width
            )
            assert desc.uniform_token_count == width


def test_graphs_of_shared_batches_keep_to_the_largest_asked_for() -> None:
    """Catches: a graph larger than the buffers for outputs, with sizes of one's own."""
    manager = make_manager(piecewise=True)
    for mode, descs in manager._capture_descs.items():
        manager._capture_descs[mode] = [d for d in descs if d.num_tokens <= 130]
    compat.keep_graphs(manager, graph_batches(MAX_REQS), RAGGED, max_query_len=9)
    kept = manager._capture_descs[CUDAGraphMode.FULL]
    assert {d.num_tokens for d in kept if d.max_query_len} == {96, 120, 128}


def test_mixed_batches_have_piecewise_graphs() -> None:
    manager = make_manager(piecewise=True)
    compat.keep_graphs(manager, graph_batches(MAX_REQS))
    desc = CudaGraphManager.dispatch(manager, 3, 17, None, 0)
    assert desc.cg_mode == CUDAGraphMode.PIECEWISE
    assert desc.num_tokens >= 17


def test_the_order_of_capture_is_kept() -> None:
    """Largest first, so that smaller graphs fit into its memory."""
    manager = make_manager(piecewise=True)
    compat.keep_graphs(manager, graph_batches(MAX_REQS))
    for descs in manager._capture_descs.values():
        tokens = [desc.num_tokens for desc in descs]
        assert tokens == sorted(tokens, reverse=True)


def test_widths_are_given_only_inside() -> None:
    before = cudagraph_utils.build_dynamic_sd_schedule_lookup
    with compat.graph_widths([0, 3, 7]):
        found = cudagraph_utils.build_dynamic_sd_schedule_lookup(
            [[1, 9, 7]], vllm_max_batch_size=1, vllm_num_speculative_tokens=7
        )
        # vLLM skips the first entry, which stands for an empty batch.
        assert found[1:] == [0, 3, 7]
    assert cudagraph_utils.build_dynamic_sd_schedule_lookup is before
