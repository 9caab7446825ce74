"""FLASHMLA with tree rows, bf16 and FP8.

FlashMLA takes one query length for all requests. A batch where they differ (drafts cut
short, a short prefill among them) goes to ``paged_tree_attention`` as a whole; graphs
hold uniform batches only, so that path is eager.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.flashmla import (
    FlashMLABackend,
    FlashMLAImpl,
    FlashMLAMetadataBuilder,
)
from vllm.v1.attention.ops.flashmla import (
    flash_mla_with_kvcache,
    flash_mla_with_kvcache_fp8,
    get_mla_metadata,
    get_mla_metadata_dense_fp8,
)

from vllm_mtp.attention.base import TreeBuilderMixin, TreeImplMixin
from vllm_mtp.attention.state import TreeAttnMetadata
from vllm_mtp.attention.triton_mla import PagedTreeMixin


class TreeFlashMLAMetadataBuilder(
    TreeBuilderMixin,
    FlashMLAMetadataBuilder,  # type: ignore[misc]
):
    """Adds the schedule of the prefix pass; None marks a batch that isn't uniform."""

    attach_always = True

    _prefix_tiles: torch.Tensor | None = None
    _prefix_splits: torch.Tensor | None = None

    def schedule_prefix(self, tree: TreeAttnMetadata, metadata: Any) -> Any:
        """FlashMLA's schedule over ``prefix_lens``; FP8: in persistent buffers."""
        num_rows = metadata.num_decodes * tree.max_query_len
        if num_rows != metadata.num_decode_tokens:
            return None
        # bf16: made by the first layer's call, so inside a captured graph.
        schedule, _ = get_mla_metadata()
        if not (self.is_fp8_kvcache and tree.active):
            return schedule
        tiles, splits = get_mla_metadata_dense_fp8(
            tree.prefix_lens, tree.max_query_len * self.num_q_heads, 1
        )
        if self.cg_buf_tile_scheduler_metadata is not None:
            if self._prefix_tiles is None:
                self._prefix_tiles = torch.zeros_like(
                    self.cg_buf_tile_scheduler_metadata
                )
                self._prefix_splits = torch.zeros_like(self.cg_buf_num_splits)
            tiles = self._prefix_tiles[: tiles.shape[0]].copy_(tiles)
            assert self._prefix_splits is not None
            splits = self._prefix_splits[: splits.shape[0]].copy_(splits)
        schedule.tile_scheduler_metadata = tiles
        schedule.num_splits = splits
        return schedule


class TreeFlashMLAImpl(
    PagedTreeMixin,
    TreeImplMixin,
    FlashMLAImpl,  # type: ignore[misc]
):
    """Prefix by FlashMLA, suffix and merge by ``tree_suffix_attention``."""

    def forward_tree(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> torch.Tensor:
        """See the base class; batches that aren't uniform take the Triton path."""
        if tree.schedule is None:
            return self.forward_paged(
                q, kv_cache, tree, tree.row_masks, attn_metadata, layer
            )
        if isinstance(q, tuple):
            # FlashMLA reads one tensor, so upstream copies here too.
            q = torch.cat(q, dim=-1)
        return super().forward_tree(q, kv_cache, tree, attn_metadata, layer)

    def forward_causal(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Upstream's call, or the Triton path for batches that aren't uniform."""
        if tree.schedule is None:
            return self.forward_paged(
                q, kv_cache, tree, None, attn_metadata, layer
            ), None
        return super().forward_causal(q, kv_cache, tree, attn_metadata, layer)

    def forward_prefix(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; the log-sum-exp is ``[num_reqs, H, max_query_len]``."""
        num_rows, num_heads, _ = q_nope.shape
        # Views of the one tensor made in forward_tree.
        query = q_nope.as_strided(
            (num_rows, num_heads, q_nope.shape[2] + q_pe.shape[2]), q_nope.stride()
        ).view(-1, tree.max_query_len, num_heads, q_nope.shape[2] + q_pe.shape[2])
        common = {
            "q": query,
            "k_cache": kv_cache.unsqueeze(-2),
            "block_table": attn_metadata.decode.block_table,
            "cache_seqlens": tree.prefix_lens,
            "head_dim_v": self.kv_lora_rank,
            "softmax_scale": self.scale,
            "causal": False,
        }
        if kv_cache.element_size() == 1:
            out, lse = flash_mla_with_kvcache_fp8(
                tile_scheduler_metadata=tree.schedule.tile_scheduler_metadata,
                num_splits=tree.schedule.num_splits,
                descale_q=layer._q_scale.reshape(1),
                descale_k=layer._k_scale.reshape(1),
                **common,
            )
        else:
            out, lse = flash_mla_with_kvcache(
                tile_scheduler_metadata=tree.schedule, is_fp8_kvcache=False, **common
            )
        return out.reshape(num_rows, num_heads, self.kv_lora_rank), lse


class TreeFlashMLABackend(FlashMLABackend):  # type: ignore[misc]
    """Takes the place of FLASHMLA."""

    @staticmethod
    def get_builder_cls() -> type[TreeFlashMLAMetadataBuilder]:
        """The tree-aware builder."""
        return TreeFlashMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TreeFlashMLAImpl]:
        """The tree-aware impl."""
        return TreeFlashMLAImpl
