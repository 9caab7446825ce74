"""Tree attention on a GPU: real backends' prefixes, real shapes, a foreign oracle."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.attention_case import (
    LATENT,
    ROPE,
    TOLERANCE,
    AttentionCase,
    randn,
)
from tests.helpers.trees import DEVICE, random_tree
from vllm_mtp.kernels.tree_attention import tree_suffix_attention
from vllm_mtp.tree.layout import EXAMPLE

pytestmark = pytest.mark.gpu


FP8_TOLERANCE = {"atol": 0.12, "rtol": 0.1}
"""FlashMLA also rounds the softmax weights to FP8: 4 bits of numbers up to about 2."""


def _uniform_case(prefixes=(700, 0, 64, 1)):
    """Four trees of seven rows; backends may touch what lies between the tokens."""
    trees = [EXAMPLE] * len(prefixes)
    case = AttentionCase(trees, list(prefixes), torch.bfloat16, heads=16, page=64)
    case.cache.nan_to_num_()
    case.block_table[case.block_table == 2**30] = 0
    return case


def _forward_prefix(impl, case, schedule, query=None, layer=None):
    """A backend's own forward_prefix, on stand-ins for what vLLM would build."""
    tree = SimpleNamespace(
        prefix_lens=case.prefix_lens,
        query_start_loc=case.starts,
        max_query_len=case.max_rows,
        max_prefix_len=1024,
        schedule=schedule,
    )
    decode = SimpleNamespace(
        block_table=case.block_table,
        max_query_len=case.max_rows,
        max_num_splits=0 if schedule is None else 32,
    )
    this = SimpleNamespace(kv_lora_rank=LATENT, scale=case.scale)
    query = case.query if query is None else query
    return impl.forward_prefix(
        this,
        query[..., :LATENT],
        query[..., LATENT:],
        case.cache,
        tree,
        SimpleNamespace(decode=decode),
        layer,
    )


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "scheduled_ahead"])
def test_flash_attention_prefix(ahead):
    """FlashAttention 3, not causal: its log-sum-exp is natural, [H, rows]."""
    module = pytest.importorskip("vllm_mtp.attention.flash_attn_mla")
    fa_utils = pytest.importorskip("vllm.v1.attention.backends.fa_utils")
    case, schedule = _uniform_case(), None
    if ahead:
        schedule = fa_utils.get_scheduler_metadata(
            batch_size=len(case.prefix_lens),
            max_seqlen_q=case.max_rows,
            max_seqlen_k=1024,
            num_heads_q=case.heads,
            num_heads_kv=1,
            headdim=ROPE,
            cache_seqlens=case.prefix_lens,
            qkv_dtype=torch.bfloat16,
            headdim_v=LATENT,
            page_size=case.page,
            cu_seqlens_q=case.starts,
            causal=False,
            num_splits=32,
        )
    out, lse = _forward_prefix(module.TreeFlashAttnMLAImpl, case, schedule)
    case.check(case.suffix(out, lse, out=out, prefix_lens=case.prefix_lens))


def test_flashmla_prefix():
    """FlashMLA, not causal: its log-sum-exp is natural, by request."""
    module = pytest.importorskip("vllm_mtp.attention.flashmla")
    case, schedule = _uniform_case(), module.get_mla_metadata()[0]
    out, lse = _forward_prefix(module.TreeFlashMLAImpl, case, schedule)
    case.check(case.suffix(out, lse, out=out, prefix_lens=case.prefix_lens))


def test_flashmla_prefix_fp8():
    """FlashMLA with FP8 query and cache, both scales given."""
    module = pytest.importorskip("vllm_mtp.attention.flashmla")
    case = _uniform_case()
    q_scale, k_scale = (torch.tensor([s], device=DEVICE) for s in (0.25, 0.5))
    query = (case.query.float() / q_scale).to(torch.float8_e4m3fn)
    cache = (case.cache.float() / k_scale).to(torch.float8_e4m3fn)
    case.query, case.cache = query.float() * q_scale, cache.float() * k_scale
    expected = case.expected()
    case.cache = cache
    tiles, splits = module.get_mla_metadata_dense_fp8(
        case.prefix_lens, case.max_rows * case.heads, 1
    )
    schedule = SimpleNamespace(tile_scheduler_metadata=tiles, num_splits=splits)
    layer = SimpleNamespace(_q_scale=q_scale, _k_scale=k_scale)
    out, lse = _forward_prefix(module.TreeFlashMLAImpl, case, schedule, query, layer)
    parts = (query[..., :LATENT], query[..., LATENT:])
    scales = {"q_scale": q_scale, "k_scale": k_scale}
    found = case.suffix(
        out, lse, query=parts, out=out, prefix_lens=case.prefix_lens, **scales
    )
    torch.testing.assert_close(found.float().cpu(), expected, **FP8_TOLERANCE)


@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(("batch", "prefix"), [(1, 1000), (4, 3000), (16, 900)])
def test_real_shapes(batch, prefix, rows):
    """DeepSeek's 16 heads a rank at serving sizes, both kernels."""
    rng = np.random.default_rng(rows)
    trees = [random_tree(rng, rows, 9) for _ in range(batch)]
    prefixes = [prefix - 7 * r for r in range(batch)]
    case = AttentionCase(trees, prefixes, torch.bfloat16, heads=16, page=64)
    expected = case.expected()
    case.check(case.suffix(*case.prefix()), expected)
    case.check(case.paged(), expected)


def test_xformers_oracle(monkeypatch):
    """An implementation that is not ours agrees on GQA trees."""
    ops = pytest.importorskip("xformers.ops.tree_attention")
    fmha = pytest.importorskip("xformers.ops.fmha")
    split_k = pytest.importorskip("xformers.ops.fmha.triton_splitk")
    # Triton's split-K is asked for by name, so the compiled part is not needed.
    monkeypatch.setattr(fmha.common, "_built_with_cuda", True)
    batch, kv_heads, group, dim, length = 2, 2, 4, 128, 96
    choices = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    meta = ops.TreeAttnMetadata.from_tree_choices(choices, torch.bfloat16, DEVICE)
    rows = meta.attention_bias.shape[0]
    shape = (batch, rows, kv_heads, group, dim)
    q = randn(*shape, dtype=torch.bfloat16)
    k, v = (randn(batch, rows, kv_heads, 1, dim, dtype=torch.bfloat16) for _ in "kv")
    ck, cv = (randn(batch, length, kv_heads, 1, dim, dtype=q.dtype) for _ in "kv")
    lens = [96, 41]
    bias = fmha.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[rows] * batch, kv_seqlen=lens, kv_padding=length
    )
    wide = (t.expand(-1, -1, -1, group, -1) for t in (k, v, ck, cv))
    try:
        expected = ops.tree_attention(
            q, *wide, meta.attention_bias, bias, prefix_op=split_k.FwOp
        )
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"xformers itself cannot run here: {error!r}")
    allowed = (meta.attention_bias == 0).long().cpu()
    bits = [sum(1 << j for j in range(rows) if row[j]) for row in allowed]
    heads = kv_heads * group
    flat = q.reshape(batch * rows, heads, dim)
    out, lse = torch.empty_like(flat), flat.new_empty(flat.shape[:2]).float()
    for r, n in enumerate(lens):
        queries = flat.view(batch, rows, kv_heads, group, dim)[r].float()
        s = torch.einsum("qhgd,thd->qhgt", queries, ck[r, :n, :, 0].float()) * dim**-0.5
        o = torch.einsum("qhgt,thd->qhgd", s.softmax(-1), cv[r, :n, :, 0].float())
        out.view(batch, rows, kv_heads, group, dim)[r] = o.to(out.dtype)
        lse.view(batch, rows, kv_heads, group)[r] = s.logsumexp(-1)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * rows
    found = tree_suffix_attention(
        flat,
        k.view(batch * rows, kv_heads, dim),
        v.view(batch * rows, kv_heads, dim),
        starts,
        torch.tensor(bits * batch, device=DEVICE),
        starts[:-1],
        torch.arange(batch * rows, device=DEVICE),
        rows,
        out,
        lse,
        dim**-0.5,
    )
    torch.testing.assert_close(
        found.view_as(expected).float(),
        expected.float(),
        **TOLERANCE[torch.bfloat16],
    )
