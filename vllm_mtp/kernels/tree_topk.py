"""Best children of each node from its draft logits, with the target's own noise.

Two launches. ``_scan_vocab_kernel``, grid (splits, rows), reads the logits once and
keeps the greatest value of each group of 128 tokens and a partial log-sum-exp.
``_merge_groups_kernel``, grid (rows,), takes the k best groups, which must hold the k
best tokens, reads those groups again and ranks their tokens. Memory moved per row: V
logits, V / 128 floats twice, 128 * k logits; bound by reading the logits at
temperature 0 and by hashing at T > 0.

At T > 0 the scan adds noise from the target's uniforms through fast logarithms (off by
about 1e-5, a third of the work); the tokens of the groups it finds are then ranked by
the target's own arithmetic, so the ids are exact unless the k-th and the next best
group are closer than that.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_mtp.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_tensor
from vllm_mtp.kernels.ranking import (
    float_to_key,
    key_to_float,
    lowest_key,
    take_best,
)
from vllm_mtp.kernels.target_noise import (
    FAST_MATH,
    add_noise,
    add_noise_fast,
    exp_fast,
    load_noise_args,
)
from vllm_mtp.reference.tree_topk import LEAST_MISS, ODDS_SHIFT, ODDS_SLOPE

GROUP = 128
"""Tokens that share one maximum between the two kernels."""

TILE = 2048
"""Tokens a program holds in registers at a time."""

MANY_TILES = 8192
"""Tiles of a launch from which a program scans ``LONG_SPLIT`` of them instead of one:
more than a GPU runs at once, so that a program's start and end weigh less."""

LONG_SPLIT = 4

_ODDS_SLOPE = tl.constexpr(ODDS_SLOPE)
_ODDS_SHIFT = tl.constexpr(ODDS_SHIFT)
_LEAST_MISS = tl.constexpr(LEAST_MISS)


@dataclass(frozen=True)
class TopkWorkspace:
    """Scratch of ``tree_topk``, allocated once so that CUDA graphs can replay it."""

    # [max_num_rows, groups] float32: greatest value per group
    group_max: torch.Tensor
    # [max_num_rows, splits] float32: greatest value per split
    split_max: torch.Tensor
    # [max_num_rows, splits] float32: sum of exp(value - split_max)
    split_sum: torch.Tensor


def build_topk_workspace(
    max_num_rows: int, vocab_size: int, device: torch.device | str
) -> TopkWorkspace:
    """Allocate the scratch for up to ``max_num_rows`` rows of ``vocab_size`` logits."""
    groups = triton.cdiv(vocab_size, GROUP)
    splits = triton.cdiv(vocab_size, TILE)
    f32 = torch.float32
    return TopkWorkspace(
        group_max=torch.empty((max_num_rows, groups), dtype=f32, device=device),
        split_max=torch.empty((max_num_rows, splits), dtype=f32, device=device),
        split_sum=torch.empty((max_num_rows, splits), dtype=f32, device=device),
    )


@triton.jit(do_not_specialize=["depth", "rows_per_req"])
def _scan_vocab_kernel(
    # [num_rows, V]
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    depth,
    rows_per_req,
    vocab_size,
    # [num_rows, num_groups]
    group_max_ptr,
    group_max_stride,
    # [num_rows, splits]
    split_max_ptr,
    split_sum_ptr,
    split_stride,
    TILES: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    USE_FP64: tl.constexpr,
    FAST: tl.constexpr,
):
    """Grid (splits, rows): group maxima and partial log-sum-exp of one split."""
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, TILE_GROUPS)
    groups = split * (TILES * TILE_GROUPS) + lanes
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row_ptr = logits_ptr + row * logits_stride
    # Before anything that waits for memory; the loop loads one tile ahead as well.
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    temperature, seed, pos = load_noise_args(
        row // rows_per_req,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        positions_ptr,
        depth,
    )
    top = tl.full([TILE_GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_GROUPS], tl.float32)
    for tile in range(TILES):
        next_tokens = tokens + TILE_GROUPS * GROUP
        next_logits = logits
        if tile + 1 < TILES:
            next_logits = tl.load(
                row_ptr + next_tokens,
                mask=next_tokens < vocab_size,
                other=float("-inf"),
            )
        values = logits.to(tl.float32)
        if temperature > 0.0:
            values = add_noise_fast(
                values, tokens, temperature, seed, pos, USE_FP64, FAST
            )
        # A maximum leaves NaN out, unless there is nothing else.
        best = tl.max(values, axis=1)
        best = tl.where(best == best, best, float("-inf"))
        tl.store(
            group_max_ptr + row * group_max_stride + groups,
            best,
            mask=groups * GROUP < vocab_size,
        )
        new_top = tl.maximum(top, best)
        # Keeps exp(-inf - shift) at 0 instead of NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total *= exp_fast(top, shift, FAST)
        total += tl.sum(exp_fast(values, shift[:, None], FAST), axis=1)
        top = new_top
        groups += TILE_GROUPS
        tokens = next_tokens
        logits = next_logits
    split_top = tl.max(top, axis=0)
    shift = tl.where(split_top == float("-inf"), 0.0, split_top)
    split_sum = tl.sum(total * exp_fast(top, shift, FAST), axis=0)
    tl.store(split_max_ptr + row * split_stride + split, split_top)
    tl.store(split_sum_ptr + row * split_stride + split, split_sum)


@triton.jit
def _calibrate(logprobs):
    """Log-probability of the draft -> estimated log-chance of acceptance.

    See ``vllm_mtp.reference.tree_topk.calibrate``.
    """
    miss = tl.maximum(1.0 - tl.exp(logprobs), _LEAST_MISS)
    odds = _ODDS_SLOPE * (logprobs - tl.log(miss)) + _ODDS_SHIFT
    return tl.minimum(odds, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(odds)))


@triton.jit(do_not_specialize=["depth", "rows_per_req"])
def _merge_groups_kernel(
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    depth,
    rows_per_req,
    vocab_size,
    group_max_ptr,
    group_max_stride,
    num_groups,
    split_max_ptr,
    split_sum_ptr,
    split_stride,
    num_splits,
    # [num_rows, K]
    topk_ids_ptr,
    topk_ids_stride,
    topk_logprobs_ptr,
    topk_logprobs_stride,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PICKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    """Grid (rows,): the k best tokens among the best groups, with log-probability."""
    row = tl.program_id(0).to(tl.int64)
    # Larger than any group or token index.
    NONE: tl.constexpr = 0x7FFFFFFF
    lanes = tl.arange(0, K_BLOCK)
    temperature, seed, pos = load_noise_args(
        row // rows_per_req,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        positions_ptr,
        depth,
    )

    groups = tl.arange(0, GROUP_BLOCK)
    in_row = groups < num_groups
    group_max = tl.load(
        group_max_ptr + row * group_max_stride + groups,
        mask=in_row,
        other=float("-inf"),
    )
    keys = float_to_key(group_max)
    keys = tl.where(in_row, keys, lowest_key(keys))
    # A row of fewer groups fills up with the group behind the last.
    picks = tl.arange(0, PICKS)
    chosen = tl.zeros([PICKS], tl.int32) + num_groups
    for pick in range(PICKS):
        _, group, keys = take_best(keys, groups, NONE)
        chosen = tl.where(picks == pick, tl.minimum(group, num_groups), chosen)

    tokens = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tokens = tl.reshape(tokens, (PICKS * GROUP,))
    logits = tl.load(
        logits_ptr + row * logits_stride + tokens,
        mask=tokens < vocab_size,
        other=float("-inf"),
    )
    values = logits.to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    if USE_FP64:
        values = values.to(tl.float64)
    if temperature > 0.0:
        values = add_noise(
            values.to(tl.float32), tokens, temperature, seed, pos, USE_FP64
        )
    # Tokens behind the vocabulary are -inf and have the highest indices: since k <= V
    # they come after all that are needed.
    keys = float_to_key(values)
    best_tokens = tl.zeros([K_BLOCK], tl.int32)
    best_keys = tl.zeros([K_BLOCK], keys.dtype)
    for j in range(K):
        key, token, keys = take_best(keys, tokens, NONE)
        best_tokens = tl.where(lanes == j, token, best_tokens)
        best_keys = tl.where(lanes == j, key, best_keys)

    splits = tl.arange(0, SPLIT_BLOCK)
    in_splits = splits < num_splits
    tops = tl.load(
        split_max_ptr + row * split_stride + splits,
        mask=in_splits,
        other=float("-inf"),
    )
    sums = tl.load(
        split_sum_ptr + row * split_stride + splits, mask=in_splits, other=0.0
    )
    top = tl.max(tops, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(tops - shift), axis=0)
    logprobs = (key_to_float(best_keys) - top).to(tl.float32) - tl.log(total)
    logprobs = tl.where(logprobs == logprobs, logprobs, float("-inf"))
    # A child never scores above its parent: rounding must not make this positive.
    logprobs = tl.minimum(_calibrate(tl.minimum(logprobs, 0.0)), 0.0)
    tl.store(
        topk_ids_ptr + row * topk_ids_stride + lanes,
        best_tokens.to(tl.int64),
        mask=lanes < K,
    )
    tl.store(
        topk_logprobs_ptr + row * topk_logprobs_stride + lanes,
        logprobs,
        mask=lanes < K,
    )


def tree_topk(
    # [num_rows, V] float32/bfloat16/float16 draft logits
    logits: torch.Tensor,
    # [>= num_rows, k] int64, out: token ids, best first
    topk_ids: torch.Tensor,
    # [>= num_rows, k] float32, out: estimated log-chance of acceptance of each
    topk_logprobs: torch.Tensor,
    # [num_reqs] int32/int64 batch row -> request slot; < 0: idle row, greedy
    idx_mapping: torch.Tensor,
    # [max_num_reqs] float32 by slot; 0 is greedy
    temperature: torch.Tensor,
    # [max_num_reqs] int64 by slot
    seeds: torch.Tensor,
    # [num_reqs] int64 by batch row: position of the token before the root's child
    positions: torch.Tensor,
    # added to positions: depth of the nodes whose children are sought
    depth: int,
    workspace: TopkWorkspace,
    use_fp64: bool = False,
) -> None:
    """Write the k best next tokens of each row and their chances of acceptance.

    The contract is that of ``vllm_mtp.reference.tree_topk``; the noise is vLLM's own
    (``vllm/v1/worker/gpu/sample/gumbel.py``, 0.32), as its sampler adds it for the
    target. Mutates ``topk_ids``, ``topk_logprobs`` and ``workspace``.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the workspace is too
            small.
    """
    num_rows, vocab_size = logits.shape
    num_reqs, k = idx_mapping.shape[0], topk_ids.shape[1]
    _check_topk(logits, topk_ids, topk_logprobs, idx_mapping, workspace)
    check_tensor("temperature", temperature, (torch.float32,), (1,), logits)
    check_tensor("seeds", seeds, (torch.int64,), (1,), logits)
    check_tensor("positions", positions, INDEX_DTYPES, (num_reqs,), logits)
    if num_rows == 0:
        return
    is_long = num_rows * triton.cdiv(vocab_size, TILE) >= MANY_TILES
    tiles = LONG_SPLIT if is_long else 1
    num_splits = triton.cdiv(vocab_size, tiles * TILE)
    num_groups = triton.cdiv(vocab_size, GROUP)
    row_args = (
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        seeds,
        positions,
        depth,
        num_rows // num_reqs,
        vocab_size,
        workspace.group_max,
        workspace.group_max.stride(0),
    )
    split_args = (
        workspace.split_max,
        workspace.split_sum,
        workspace.split_sum.stride(0),
    )
    _scan_vocab_kernel[(num_splits, num_rows)](
        *row_args,
        *split_args,
        TILES=tiles,
        TILE_GROUPS=TILE // GROUP,
        GROUP=GROUP,
        USE_FP64=use_fp64,
        FAST=FAST_MATH,
        num_warps=4,
    )
    k_block = triton.next_power_of_2(k)
    _merge_groups_kernel[(num_rows,)](
        *row_args,
        num_groups,
        *split_args,
        num_splits,
        topk_ids,
        topk_ids.stride(0),
        topk_logprobs,
        topk_logprobs.stride(0),
        K=k,
        K_BLOCK=k_block,
        # One to spare even for k = 1, since the scan's noise is not exact.
        PICKS=max(k_block, 2),
        GROUP=GROUP,
        GROUP_BLOCK=triton.next_power_of_2(num_groups),
        SPLIT_BLOCK=triton.next_power_of_2(num_splits),
        USE_FP64=use_fp64,
        num_warps=4,
    )


def _check_topk(
    logits: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_logprobs: torch.Tensor,
    idx_mapping: torch.Tensor,
    workspace: TopkWorkspace,
) -> None:
    num_rows, vocab_size = logits.shape
    num_reqs, k = idx_mapping.shape[0], topk_ids.shape[1]
    check_tensor("logits", logits, FLOAT_DTYPES, (0, k), logits)
    check_tensor("topk_ids", topk_ids, (torch.int64,), (num_rows, 1), logits)
    check_tensor(
        "topk_logprobs", topk_logprobs, (torch.float32,), (num_rows, k), logits
    )
    check_tensor("idx_mapping", idx_mapping, INDEX_DTYPES, (0,), logits)
    if num_reqs and num_rows % num_reqs:
        raise ValueError(
            f"logits: {num_rows} rows, expected a multiple of {num_reqs} requests"
        )
    groups = triton.cdiv(vocab_size, GROUP)
    rows_free, groups_free = workspace.group_max.shape
    if rows_free < num_rows or groups_free < groups:
        raise ValueError(
            f"workspace: {rows_free} rows of {groups_free * GROUP} tokens, expected at "
            f"least {num_rows} of {vocab_size}; use build_topk_workspace"
        )
