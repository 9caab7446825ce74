"""Move what the accepted path left behind to the front of its request.

``commit_kv`` is one launch over (cache views, requests, slices of a row); a program
walks its request's path in order, so the bytes moved are 2 * row bytes * layers *
accepted drafts and nothing else. ``commit_rows`` is one launch over (requests, slices
of H). In both, the thread that owns a word of a row owns it in every row, so no row is
overwritten before it was read.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_tensor

ROW_SLICE_BYTES = 4096
"""Most bytes of a cache row that one program moves."""

HIDDEN_BLOCK = 1024
"""Elements of a hidden state that one program moves."""

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class KVLayout:
    """Device table of all cache views, built once per KV cache allocation.

    It holds addresses, not tensors: build it again whenever the caches move.
    """

    # [num_views, 6] int64: address, block stride, row stride, row length (the three
    # in words), block size, KV cache group
    table: torch.Tensor

    word_bytes: int
    """Widest of 8, 4, 2, 1 that divides every address, stride and row."""

    max_row_words: int
    """Longest row, in words."""

    num_groups: int
    """One more than the highest group index."""


def build_kv_table(
    # per layer: [num_blocks, block_size, ...] paged cache of any dtype and strides
    kv_caches: Sequence[torch.Tensor],
    # per layer: index into slot_mappings
    layer_groups: Sequence[int],
) -> KVLayout:
    """Describe the caches of all target layers for ``commit_kv``.

    A cache whose row is not contiguous (heads outside of tokens, keys apart from
    values) becomes several views. Layers that share one cache are listed once, since
    moving twice would be wrong.

    Raises:
        ValueError: No caches, caches on several devices, or a cache of fewer than two
            dimensions.
    """
    views: dict[tuple[int, ...], int] = {}
    for cache, group in zip(kv_caches, layer_groups, strict=True):
        if cache.dim() < 2:
            raise ValueError(
                f"kv_caches: shape {tuple(cache.shape)}, expected [num_blocks, "
                "block_size, ...]"
            )
        if cache.device != kv_caches[0].device:
            raise ValueError("kv_caches: on several devices")
        for view in _split_rows(cache):
            size = view.element_size()
            row_bytes = math.prod(view.shape[2:]) * size
            strides = (view.stride(0) * size, view.stride(1) * size)
            key = (view.data_ptr(), *strides, row_bytes, view.shape[1], group)
            views.setdefault(key, len(views))
    if not views:
        raise ValueError("kv_caches: empty, expected one per target layer")
    word = math.gcd(8, *(value for key in views for value in key[:4]))
    rows = [
        (base, block // word, row // word, length // word, block_size, group)
        for base, block, row, length, block_size, group in views
    ]
    return KVLayout(
        table=torch.tensor(rows, dtype=torch.int64, device=kv_caches[0].device),
        word_bytes=word,
        max_row_words=max(row[3] for row in rows),
        num_groups=max(layer_groups) + 1,
    )


def _split_rows(cache: torch.Tensor) -> list[torch.Tensor]:
    """Views of a cache ``[num_blocks, block_size, ...]`` whose rows are contiguous."""
    expected = 1
    for dim in range(cache.dim() - 1, 1, -1):
        if cache.shape[dim] > 1 and cache.stride(dim) != expected:
            return [
                part
                for index in range(cache.shape[2])
                for part in _split_rows(cache.select(2, index))
            ]
        expected *= cache.shape[dim]
    return [cache]


@triton.jit
def _commit_kv_kernel(
    # [num_views, 6] int64
    table_ptr,
    # [num_groups, num_tokens] int64
    slot_mappings_ptr,
    slot_mappings_stride,
    # [num_reqs, 1 + N] int32
    path_ptr,
    path_stride,
    num_accepted_ptr,
    query_start_loc_ptr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (views, num_reqs, row slices): one slice of a request's rows in one view.

    Slots of -1 belong to no block and are neither read nor written.
    """
    req = tl.program_id(1).to(tl.int64)
    num_accepted = tl.load(num_accepted_ptr + req)
    entry_ptr = table_ptr + tl.program_id(0) * 6
    base = tl.load(entry_ptr)
    block_stride = tl.load(entry_ptr + 1)
    row_stride = tl.load(entry_ptr + 2)
    row_words = tl.load(entry_ptr + 3)
    block_size = tl.load(entry_ptr + 4)
    group = tl.load(entry_ptr + 5)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    if num_accepted <= 1:
        return
    words_ptr = tl.cast(base, tl.pointer_type(WORD))
    slots_ptr = slot_mappings_ptr + group * slot_mappings_stride + start
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    for j in range(1, num_accepted):
        row = tl.load(path_ptr + req * path_stride + j)
        source = tl.load(slots_ptr + row)
        target = tl.load(slots_ptr + j)
        moves = (source >= 0) & (target >= 0) & (source != target)
        mask = offsets < tl.where(moves, row_words, 0)
        source_row = (
            source // block_size * block_stride + source % block_size * row_stride
        )
        target_row = (
            target // block_size * block_stride + target % block_size * row_stride
        )
        words = tl.load(words_ptr + source_row + offsets, mask=mask)
        tl.store(words_ptr + target_row + offsets, words, mask=mask)


def commit_kv(
    # caches of all target layers, see build_kv_table
    layout: KVLayout,
    # [num_groups, num_tokens] int64 physical slot of each query row, -1: none
    slot_mappings: torch.Tensor,
    # [num_reqs, 1 + N] int32 accepted rows, root first
    path: torch.Tensor,
    # [num_reqs] int32 how many rows of path are accepted, root included
    num_accepted: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
) -> None:
    """Copy the cache entry of row ``path[j]`` to row ``j``, j = 1, 2, ...

    The contract is that of ``vllm_mtp.reference.kv_commit``, with the caches given as
    the table that ``build_kv_table`` made of them. Mutates the caches.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    num_reqs, table = num_accepted.shape[0], layout.table
    check_tensor(
        "slot_mappings", slot_mappings, (torch.int64,), (layout.num_groups, 0), table
    )
    _check_path(path, num_accepted, query_start_loc, table)
    if num_reqs == 0:
        return
    block = min(
        triton.next_power_of_2(layout.max_row_words),
        ROW_SLICE_BYTES // layout.word_bytes,
    )
    grid = (table.shape[0], num_reqs, triton.cdiv(layout.max_row_words, block))
    _commit_kv_kernel[grid](
        table,
        slot_mappings,
        slot_mappings.stride(0),
        path,
        path.stride(0),
        num_accepted,
        query_start_loc,
        WORD=_WORDS[layout.word_bytes],
        BLOCK=block,
        num_warps=1,
    )


@triton.jit
def _commit_rows_kernel(
    path_ptr,
    path_stride,
    num_accepted_ptr,
    query_start_loc_ptr,
    # [num_tokens, H]
    hidden_states_ptr,
    hidden_states_stride,
    hidden_size,
    # [num_tokens]
    input_ids_ptr,
    positions_ptr,
    PATH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_reqs, slices of H); the first slice moves ids and positions too."""
    req = tl.program_id(0).to(tl.int64)
    num_accepted = tl.load(num_accepted_ptr + req)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    if num_accepted <= 1:
        return
    if tl.program_id(1) == 0:
        rows = tl.arange(0, PATH_BLOCK)
        moves = (rows > 0) & (rows < num_accepted)
        sources = tl.load(path_ptr + req * path_stride + rows, mask=moves, other=0)
        ids = tl.load(input_ids_ptr + start + sources, mask=moves, other=0)
        root = tl.load(positions_ptr + start)
        # A row may be one lane's source and another's target: read all, then write.
        tl.debug_barrier()
        tl.store(input_ids_ptr + start + rows, ids, mask=moves)
        tl.store(positions_ptr + start + rows, root + rows, mask=moves)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < hidden_size
    slice_ptr = hidden_states_ptr + start * hidden_states_stride + offsets
    for j in range(1, num_accepted):
        row = tl.load(path_ptr + req * path_stride + j).to(tl.int64)
        hidden = tl.load(slice_ptr + row * hidden_states_stride, mask=mask)
        tl.store(slice_ptr + j * hidden_states_stride, hidden, mask=mask)


def commit_rows(
    # [num_reqs, 1 + N] int32 accepted rows, root first
    path: torch.Tensor,
    # [num_reqs] int32
    num_accepted: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_tokens, H], in place
    hidden_states: torch.Tensor,
    # [num_tokens] int32, in place
    input_ids: torch.Tensor,
    # [num_tokens] int64, in place: root position + depth in, linear out
    positions: torch.Tensor,
) -> None:
    """Move hidden states and token ids along the path; make positions linear again.

    The contract is that of ``vllm_mtp.reference.kv_commit``. Mutates the last three.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    num_reqs = num_accepted.shape[0]
    _check_path(path, num_accepted, query_start_loc, hidden_states)
    check_tensor("hidden_states", hidden_states, FLOAT_DTYPES, (0, 1), hidden_states)
    check_tensor("input_ids", input_ids, INDEX_DTYPES, (0,), hidden_states)
    check_tensor("positions", positions, (torch.int64,), (0,), hidden_states)
    if num_reqs == 0:
        return
    hidden_size = hidden_states.shape[1]
    block = min(triton.next_power_of_2(hidden_size), HIDDEN_BLOCK)
    _commit_rows_kernel[(num_reqs, triton.cdiv(hidden_size, block))](
        path,
        path.stride(0),
        num_accepted,
        query_start_loc,
        hidden_states,
        hidden_states.stride(0),
        hidden_size,
        input_ids,
        positions,
        PATH_BLOCK=triton.next_power_of_2(path.shape[1]),
        BLOCK=block,
        num_warps=4,
    )


def _check_path(
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    query_start_loc: torch.Tensor,
    like: torch.Tensor,
) -> None:
    num_reqs = num_accepted.shape[0]
    check_tensor("path", path, (torch.int32,), (num_reqs, 1), like)
    check_tensor("num_accepted", num_accepted, INDEX_DTYPES, (num_reqs,), like)
    check_tensor(
        "query_start_loc", query_start_loc, INDEX_DTYPES, (num_reqs + 1,), like
    )
