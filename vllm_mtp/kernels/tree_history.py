"""Sampling parameters that look back, on trees: each row sees its own ancestors.

vLLM's own kernels read a row's history off the rows before it, which is right for a
chain. Here the history of a row is the committed output followed by the tokens on its
path from the root. One program per row (and bad word); a few dozen values each.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.buffers import TreeBuffers


@triton.jit
def _gather_ancestors_kernel(
    parents_ptr,
    parents_stride,
    row_slots_ptr,
    local_rows_ptr,
    tokens_ptr,
    ancestors_ptr,
    MAX_DEPTH: tl.constexpr,
):
    """Grid (num_rows,): walk from the row up to the root."""
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + i).to(tl.int64)
    row = tl.load(local_rows_ptr + i).to(tl.int64)
    first = i - row
    for j in range(MAX_DEPTH):
        on_path = row > 0
        token = tl.load(tokens_ptr + first + row, mask=on_path, other=-1).to(tl.int64)
        tl.store(ancestors_ptr + i * MAX_DEPTH + j, token)
        parent = tl.load(
            parents_ptr + slot * parents_stride + row, mask=on_path, other=0
        )
        row = parent.to(tl.int64)


def gather_ancestors(
    buffers: TreeBuffers,
    # [num_rows] int64 row -> request slot
    row_slots: torch.Tensor,
    # [num_rows] int32 row within its request, 0: the root
    local_rows: torch.Tensor,
    # [num_rows] token fed into each row
    tokens: torch.Tensor,
    # [num_rows, S] int64, contiguous, out
    ancestors: torch.Tensor,
) -> None:
    """Contract: ``vllm_mtp.reference.tree_history.gather_ancestors``."""
    _gather_ancestors_kernel[(row_slots.shape[0],)](
        buffers.parents,
        buffers.parents.stride(0),
        row_slots,
        local_rows,
        tokens,
        ancestors,
        MAX_DEPTH=ancestors.shape[1],
    )


@triton.jit
def _penalize_ancestors_kernel(
    logits_ptr,
    logits_stride,
    raw_ptr,
    ancestors_ptr,
    row_slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    counts_ptr,
    counts_stride,
    MAX_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows,): the penalised logits of one row's ancestors."""
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + i).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
        return
    place = tl.arange(0, BLOCK)
    inside = place < MAX_DEPTH
    base = i * MAX_DEPTH
    tokens = tl.load(ancestors_ptr + base + place, mask=inside, other=-1)
    on_path = tokens >= 0
    counts = tl.load(counts_ptr + slot * counts_stride + tokens, mask=on_path, other=0)
    for j in range(MAX_DEPTH):
        other = tl.load(ancestors_ptr + base + j)
        counts = counts + (tokens == other).to(tl.int32)
    logits = tl.load(raw_ptr + base + place, mask=on_path, other=0.0)
    # The order of operations of vLLM's penalties kernel; every count is positive.
    logits *= tl.where(logits > 0, 1.0 / repetition, repetition)
    logits -= frequency * counts
    logits -= presence
    tl.store(logits_ptr + i * logits_stride + tokens, logits, mask=on_path)


def penalize_ancestors(
    # [num_rows, V] float32, penalised for the committed tokens; in place
    logits: torch.Tensor,
    # [num_rows, S] float32, contiguous: logits of the ancestors before any penalty
    raw: torch.Tensor,
    # [num_rows, S] int64, contiguous, -1: none
    ancestors: torch.Tensor,
    # [num_rows] int64 row -> request slot
    row_slots: torch.Tensor,
    # [max_num_reqs] float32 each, by slot
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    # [max_num_reqs, V] int32 committed output tokens by slot
    output_bin_counts: torch.Tensor,
) -> None:
    """Contract: ``vllm_mtp.reference.tree_history.penalize_ancestors``."""
    _penalize_ancestors_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        raw,
        ancestors,
        row_slots,
        repetition_penalty,
        frequency_penalty,
        presence_penalty,
        output_bin_counts,
        output_bin_counts.stride(0),
        MAX_DEPTH=ancestors.shape[1],
        BLOCK=triton.next_power_of_2(ancestors.shape[1]),
    )


@triton.jit
def _mask_bad_words_kernel(
    logits_ptr,
    logits_stride,
    ancestors_ptr,
    row_slots_ptr,
    word_tokens_ptr,
    word_tokens_stride,
    word_offsets_ptr,
    word_offsets_stride,
    num_words_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    prompt_len_ptr,
    total_len_ptr,
    MAX_DEPTH: tl.constexpr,
):
    """Grid (num_rows, words): does the word's beginning end this row's output?"""
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    slot = tl.load(row_slots_ptr + i).to(tl.int64)
    if word >= tl.load(num_words_ptr + slot):
        return
    offsets = word_offsets_ptr + slot * word_offsets_stride + word
    start = tl.load(offsets)
    end = tl.load(offsets + 1)
    tokens = word_tokens_ptr + slot * word_tokens_stride

    depth = 0
    for j in range(MAX_DEPTH):
        depth += (tl.load(ancestors_ptr + i * MAX_DEPTH + j) >= 0).to(tl.int32)
    prompt_len = tl.load(prompt_len_ptr + slot)
    total_len = tl.load(total_len_ptr + slot)
    if end - 1 - start > total_len - prompt_len + depth:
        return
    match = 1
    # From the token before the word's last one backwards; `back` counts from 0.
    for back in range(end - 1 - start):
        wanted = tl.load(tokens + end - 2 - back).to(tl.int64)
        is_drafted = back < depth
        drafted = tl.load(
            ancestors_ptr + i * MAX_DEPTH + back, mask=is_drafted, other=-1
        )
        committed = tl.load(
            all_token_ids_ptr
            + slot * all_token_ids_stride
            + total_len
            - 1
            - (back - depth),
            mask=back >= depth,
            other=-1,
        ).to(tl.int64)
        found = tl.where(is_drafted, drafted, committed)
        match = match & (found == wanted).to(tl.int32)
    if match != 0:
        last = tl.load(tokens + end - 1)
        tl.store(logits_ptr + i * logits_stride + last, float("-inf"))


def mask_bad_words(
    # [num_rows, V] float32, in place
    logits: torch.Tensor,
    # [num_rows, S] int64, contiguous: ancestors, own token first, -1: none
    ancestors: torch.Tensor,
    # [num_rows] int64 row -> request slot
    row_slots: torch.Tensor,
    # [max_num_reqs, *] int32 by slot: words one after the other, and where they start
    word_tokens: torch.Tensor,
    word_offsets: torch.Tensor,
    # [max_num_reqs] int32
    num_words: torch.Tensor,
    # [max_num_reqs, max_model_len] int32, [max_num_reqs] int32 each
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    # greatest num_words of the batch
    max_num_words: int,
) -> None:
    """Contract: ``vllm_mtp.reference.tree_history.mask_bad_words``."""
    _mask_bad_words_kernel[(logits.shape[0], max_num_words)](
        logits,
        logits.stride(0),
        ancestors,
        row_slots,
        word_tokens,
        word_tokens.stride(0),
        word_offsets,
        word_offsets.stride(0),
        num_words,
        all_token_ids,
        all_token_ids.stride(0),
        prompt_len,
        total_len,
        MAX_DEPTH=ancestors.shape[1],
    )
