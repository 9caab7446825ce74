"""Tree-aware MLA on the CPU: for tests and demos, not for speed.

Upstream's CPU decode kernel takes one row per request and returns no log-sum-exp, and
its prefill cannot see a cached prefix. Here every request of any length runs in the
latent space over the paged cache: whole prefills and causal rows in plain torch, tree
rows as prefix in torch plus the same Triton suffix kernel that runs on GPUs.
"""

import itertools
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_mtp.attention.base import TreeAttnMetadata, TreeBuilderMixin, TreeImplMixin
from vllm_mtp.config import MAX_ROWS

ANY_LENGTH = 1 << 30


class TreeCPUMLAMetadataBuilder(
    TreeBuilderMixin,
    MLACommonMetadataBuilder,  # type: ignore[misc]
):
    """Sends requests of every length down the decode path."""

    attach_always = True

    def _init_reorder_batch_threshold(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._init_reorder_batch_threshold(*args, **kwargs)
        self.reorder_batch_threshold = ANY_LENGTH

    def _find_trees(
        self: Any, state: Any, metadata: Any, common: Any
    ) -> tuple[int, int, int]:
        # The impl tells them apart, and its causal path uses the same metadata.
        return metadata.num_decodes, metadata.num_decode_tokens, common.max_query_len


class TreeCPUMLAImpl(TreeImplMixin, CPUMLAImpl):  # type: ignore[misc]
    """Attention over the paged latent cache, request by request."""

    def forward_causal(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = torch.cat(self.split_query(q), dim=-1)
        out, _ = self._attend(query, kv_cache, attn_metadata.decode, tree, causal=True)
        return out, None

    def forward_tree(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> torch.Tensor:
        """Tree requests lead the batch; long prefills behind them stay causal."""
        q_nope, q_pe = self.split_query(q)
        query = torch.cat((q_nope, q_pe), dim=-1)
        starts = tree.query_start_loc.tolist()
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        limit = min(MAX_ROWS, tree.max_suffix) if tree.role == "verify" else ANY_LENGTH
        num_short = next((r for r, n in enumerate(lengths) if n > limit), len(lengths))
        rows = starts[num_short]
        decode = attn_metadata.decode
        out: torch.Tensor
        out, lse = self._attend(query, kv_cache, decode, tree, causal=False)
        if num_short < len(lengths):
            long_out, _ = self._attend(query, kv_cache, decode, tree, causal=True)
            out[rows:] = long_out[rows:]
        if rows:
            short = TreeAttnMetadata(
                prefix_lens=tree.prefix_lens[:num_short],
                query_start_loc=tree.query_start_loc[: num_short + 1],
                row_masks=None if tree.row_masks is None else tree.row_masks[:rows],
                suffix_start=tree.suffix_start[:num_short],
                suffix_slots=tree.suffix_slots,
                max_suffix=tree.max_suffix,
                max_query_len=max(lengths[:num_short]),
                max_prefix_len=tree.max_prefix_len,
                role=tree.role,
            )
            self.attend_suffix(
                q_nope[:rows],
                q_pe[:rows],
                kv_cache,
                short,
                out[:rows],
                lse[:rows],
                layer,
            )
        return out

    def _attend(
        self: Any,
        # [num_rows, H, Lkv + R]
        query: torch.Tensor,
        # [num_blocks, block_size, Lkv + R]
        kv_cache: torch.Tensor,
        decode: Any,
        tree: TreeAttnMetadata,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal over prefix and own rows, or unmasked over the prefix alone.

        Returns ``[num_rows, H, Lkv]`` in query dtype and float32 log-sum-exp.
        """
        out = torch.zeros_like(query[..., : self.kv_lora_rank])
        lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float32)
        starts = tree.query_start_loc.tolist()
        block_size = kv_cache.shape[1]
        for r, prefix in enumerate(tree.prefix_lens.tolist()):
            start, end = starts[r], starts[r + 1]
            length = prefix + (end - start if causal else 0)
            if end == start or length <= 0:
                continue
            blocks = decode.block_table[r, : -(-length // block_size)].long()
            keys = kv_cache[blocks].flatten(0, 1)[:length].float()
            scores = torch.einsum("qhd,td->hqt", query[start:end].float(), keys)
            scores *= self.scale
            if causal and end - start > 1:
                seen = (
                    torch.arange(length) <= prefix + torch.arange(end - start)[:, None]
                )
                scores.masked_fill_(~seen, float("-inf"))
            lse[start:end] = torch.logsumexp(scores, dim=-1).T
            values = torch.softmax(scores, dim=-1) @ keys[:, : self.kv_lora_rank]
            out[start:end] = values.transpose(0, 1).to(out.dtype)
        return out, lse


class TreeCPUMLABackend(CPUMLABackend):  # type: ignore[misc]
    """CPU_MLA with trees."""

    @staticmethod
    def get_builder_cls() -> type:
        return TreeCPUMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type:
        return TreeCPUMLAImpl


class TreeAMXMLABackend(TreeCPUMLABackend):
    """Stands in for AMX_MLA, which vLLM picks on hosts with AMX: any block size, and
    with it vLLM leaves chunked prefill and prefix caching on."""

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: Any = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0

    @staticmethod
    def get_name() -> str:
        return "AMX_MLA"
