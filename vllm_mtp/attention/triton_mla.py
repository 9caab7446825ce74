"""TRITON_MLA with tree rows: prefix and suffix in one pass over the paged KV.

Also the causal passes go through ``paged_tree_attention`` (causal masks are masks):
upstream's kernel runs once per row and takes uniform batches only.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)

from vllm_mtp.attention.base import TreeBuilderMixin, TreeImplMixin, get_state
from vllm_mtp.attention.state import TreeAttnMetadata


class PagedTreeMixin:
    """Impl methods on ``paged_tree_attention``; goes before ``TreeImplMixin``."""

    def forward_paged(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        # [num_rows] int64; None: causal
        row_masks: torch.Tensor | None,
        attn_metadata: Any,
        layer: Any,
    ) -> torch.Tensor:
        """Prefix and suffix in one pass: ``[num_rows, H, Lkv]``."""
        from vllm_mtp.kernels.paged_tree_attention import paged_tree_attention

        query = self.split_query(q)
        quantized_query = query[0].element_size() == 1
        return paged_tree_attention(
            query,
            kv_cache,
            attn_metadata.decode.block_table,
            tree.prefix_lens,
            tree.query_start_loc,
            row_masks,
            tree.suffix_start,
            tree.suffix_slots,
            tree.max_suffix,
            self.scale,
            max_query_len=tree.max_query_len,
            max_prefix_len=tree.max_prefix_len,
            suffix_cache=self.suffix_cache(kv_cache, tree),
            q_scale=layer._q_scale if quantized_query else None,
            k_scale=layer._k_scale if kv_cache.element_size() == 1 else None,
            out_dtype=torch.bfloat16 if quantized_query else None,
        )


class TreeTritonMLAMetadataBuilder(
    TreeBuilderMixin,
    TritonMLAMetadataBuilder,  # type: ignore[misc]
):
    """Describes the rows of every pass, as causal passes use the same kernel."""

    attach_always = True

    def _reserve_attn_logits_workspace(self) -> None:
        # Upstream's kernel, which needs it, is not used for trees.
        if get_state() is None:
            super()._reserve_attn_logits_workspace()


class TreeTritonMLAImpl(
    PagedTreeMixin,
    TreeImplMixin,
    TritonMLAImpl,  # type: ignore[misc]
):
    """Everything by ``paged_tree_attention``."""

    def reserve_workspace(self) -> None:
        """vLLM 0.33 sizes upstream's workspace here; the tree kernel has none."""
        if get_state() is None:
            super().reserve_workspace()

    def forward_tree(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> torch.Tensor:
        """Tree rows under their ancestor bits."""
        return self.forward_paged(
            q, kv_cache, tree, tree.row_masks, attn_metadata, layer
        )

    def forward_causal(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same rows, causal: draft prefills and passes without drafts."""
        out = self.forward_paged(q, kv_cache, tree, None, attn_metadata, layer)
        return out, None


class TreeTritonMLABackend(TritonMLABackend):  # type: ignore[misc]
    """Takes the place of TRITON_MLA."""

    @staticmethod
    def get_builder_cls() -> type[TreeTritonMLAMetadataBuilder]:
        """The tree-aware builder."""
        return TreeTritonMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TreeTritonMLAImpl]:
        """The tree-aware impl."""
        return TreeTritonMLAImpl
