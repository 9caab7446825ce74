"""FLASH_ATTN_MLA (FlashAttention 3) with tree rows.

The prefix pass is upstream's call with ``causal=False``, the prefix lengths and the
log-sum-exp out; it costs the same as the causal pass. Its ahead-of-time schedule is
made beside the causal one, which the draft layer's prefill still needs.
"""

import dataclasses
from typing import Any

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

from vllm_mtp.attention.base import TreeBuilderMixin, TreeImplMixin
from vllm_mtp.attention.splits import fit_splits
from vllm_mtp.attention.state import TreeAttnMetadata, get_state


class TreeFlashAttnMLAMetadataBuilder(
    TreeBuilderMixin,
    FlashAttnMLAMetadataBuilder,  # type: ignore[misc]
):
    """Adds the schedule of the prefix pass, in a persistent buffer for graphs."""

    _prefix_schedule: torch.Tensor | None = None

    def _build_decode(self, *args: Any, **kwargs: Any) -> Any:
        """With fewer parts of the KV where there are many rows.

        In graphs FlashAttention keeps a float32 result of every row for each of 32
        parts: 2 GB at 2048 rows of 16 heads, where requests fill the GPU by themselves.
        A replay must not have more parts than its graph: vLLM builds its metadata for
        the graph's number of rows, so both get the same number here.
        """
        most: int = self.max_num_splits  # type: ignore[has-type]
        rows = kwargs["num_decode_tokens"]
        kwargs = self._bound_queries(kwargs)
        self.max_num_splits = fit_splits(
            most, rows * self.num_heads * self.mla_dims.kv_lora_rank * 4
        )
        try:
            return super()._build_decode(*args, **kwargs)
        finally:
            self.max_num_splits = most

    def _bound_queries(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Upstream takes the longest query from the host's lengths, which are only
        equal shares where a batch shares its nodes."""
        state = get_state()
        longest = 0
        if state is not None and self.tree_role == "verify":
            longest = state.ragged_query_len
        if self._capturing:
            longest = kwargs["max_query_len"]
        if longest <= int(kwargs["query_start_loc_cpu"].diff().max()):
            return kwargs
        return kwargs | {"query_start_loc_cpu": torch.tensor([0, longest])}

    def _schedule_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        # A draft level has no causal pass.
        if self.tree_role == "draft" and kwargs.get("causal", True):
            return None
        schedule: torch.Tensor | None = super()._schedule_decode(*args, **kwargs)
        return schedule

    def schedule_prefix(
        self, tree: TreeAttnMetadata, metadata: Any
    ) -> torch.Tensor | None:
        """Schedule ``forward_prefix``; the tail of the buffer is zero, as upstream."""
        if not tree.active or not tree.prefix_lens.shape[0]:
            return None
        schedule = self._schedule_decode(
            num_reqs=tree.prefix_lens.shape[0],
            cu_query_lens=tree.query_start_loc,
            max_query_len=max(tree.max_query_len, 1),
            seqlens=tree.prefix_lens,
            max_seq_len=tree.max_prefix_len,
            causal=False,
            max_num_splits=metadata.decode.max_num_splits,
        )
        if schedule is None or not self.use_full_cuda_graph:
            return schedule
        if self._prefix_schedule is None:
            self._prefix_schedule = torch.zeros_like(self.scheduler_metadata)
        buffer = self._prefix_schedule
        size = schedule.shape[0]
        if size > buffer.shape[0]:
            raise RuntimeError(
                f"The FlashAttention schedule of {tree.prefix_lens.shape[0]} requests "
                f"needs {size} numbers and the buffer has {buffer.shape[0]}. Raise "
                "max_num_seqs, or use --attention-backend TRITON_MLA."
            )
        buffer[:size] = schedule
        buffer[size:] = 0
        return buffer[:size]

    def build_rest(
        self, metadata: Any, common: Any, num_reqs: int, num_rows: int
    ) -> Any:
        """Short prefills, with their own schedule; never in a graph."""
        decode = metadata.decode
        lengths = common.query_start_loc_cpu[num_reqs : metadata.num_decodes + 1].diff()
        rest = dataclasses.replace(
            decode,
            block_table=decode.block_table[num_reqs:],
            seq_lens=decode.seq_lens[num_reqs:],
            query_start_loc=decode.query_start_loc[num_reqs:] - num_rows,
            max_query_len=int(lengths.max()),
        )
        rest.scheduler_metadata = self._schedule_decode(
            num_reqs=rest.seq_lens.shape[0],
            cu_query_lens=rest.query_start_loc,
            max_query_len=rest.max_query_len,
            seqlens=rest.seq_lens,
            max_seq_len=rest.max_seq_len,
            causal=True,
            max_num_splits=rest.max_num_splits,
        )
        return rest


class TreeFlashAttnMLAImpl(TreeImplMixin, FlashAttnMLAImpl):  # type: ignore[misc]
    """Prefix by FlashAttention 3, suffix and merge by ``tree_suffix_attention``."""

    def forward_prefix(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; the log-sum-exp is a transposed view of ``[H, rows]``."""
        del layer
        latent = self.kv_lora_rank
        out, lse = flash_attn_varlen_func(
            q=q_pe,
            k=kv_cache[..., latent:].unsqueeze(-2),
            v=kv_cache[..., :latent].unsqueeze(-2),
            q_v=q_nope,
            max_seqlen_q=max(tree.max_query_len, 1),
            cu_seqlens_q=tree.query_start_loc,
            max_seqlen_k=tree.max_prefix_len,
            seqused_k=tree.prefix_lens,
            block_table=attn_metadata.decode.block_table[: tree.prefix_lens.shape[0]],
            softmax_scale=self.scale,
            causal=False,
            return_softmax_lse=True,
            fa_version=3,
            scheduler_metadata=tree.schedule,
            num_splits=attn_metadata.decode.max_num_splits,
        )
        return out, lse.transpose(0, 1)


class TreeFlashAttnMLABackend(FlashAttnMLABackend):  # type: ignore[misc]
    """Takes the place of FLASH_ATTN_MLA."""

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttnMLAMetadataBuilder]:
        """The tree-aware builder."""
        return TreeFlashAttnMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttnMLAImpl]:
        """The tree-aware impl."""
        return TreeFlashAttnMLAImpl
