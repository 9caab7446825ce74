"""What every tree-aware MLA backend shares: the builder and impl mixins.

For tree rows attention is **prefix** (all tokens before the root, unmasked, the
backend's own kernel, with log-sum-exp) plus **suffix** (the tree's own rows under
their ancestor bits) merged by log-sum-exp. Rows without a tree carry causal bits, so a
verify pass has one code path; prefill rows and layers stay upstream's.

Two kinds of passes use it:

* *verify*: the target's layers, suffix rows in the paged cache at the slots the rows
  were just written to. The draft layer's prefill reuses this metadata object, so draft
  layers take the stock causal path when they meet it;
* *draft level*: the MTP layer, suffix rows in a scratch cache of the same layout, so
  drafted KV never touches the paged cache.
"""

import dataclasses
import itertools
from typing import Any

import torch

from vllm_mtp.attention.state import (
    Role,
    TreeAttnMetadata,
    TreeAttnState,
    build_attn_state,
    get_state,
    set_state,
)

__all__ = [
    "TreeAttnMetadata",
    "TreeAttnState",
    "TreeBuilderMixin",
    "TreeImplMixin",
    "build_attn_state",
    "get_state",
    "register_tree_backends",
    "set_state",
]

SCRATCH_BLOCK_SIZE = 64
"""Rows of one block of a scratch cache; only the address arithmetic depends on it."""


class TreeBuilderMixin:
    """Metadata builder that adds ``decode.tree``; goes before the backend's builder.

    ``tree_role`` is "verify"; the speculator sets "draft" on the builders of the draft
    layer's own attention groups.
    """

    tree_role: Role = "verify"

    attach_always = False
    """Attach (inactive) metadata to passes without drafts too."""

    max_tree_rows = 1
    """Rows of the widest tree pass, ``max(1 + N, F)``."""

    _capturing = False

    def _init_reorder_batch_threshold(
        self: Any,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Decode path for requests of up to ``max(1 + N, F)`` rows, of any mix.

        A backend whose decode path takes any mix upstream keeps its own, higher
        threshold, so that short prompts run, and round, as without trees; the rows
        behind the trees are then described by ``tree.rest``. Elsewhere longer requests
        that upstream may send down the decode path go to ``forward_mha``.
        """
        upstream: Any = super()
        state = get_state()
        if state is None:
            upstream._init_reorder_batch_threshold(
                reorder_batch_threshold,
                supports_spec_as_decode,
                supports_dcp_with_varlen,
            )
            return
        from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport

        takes_any_mix = self.query_len_support == QueryLenSupport.VARLEN
        upstream._init_reorder_batch_threshold(
            reorder_batch_threshold if takes_any_mix else 1,
            True,
            supports_dcp_with_varlen,
        )
        self.max_tree_rows = max(state.shape.num_rows, state.shape.frontier)
        self.reorder_batch_threshold = max(
            self.reorder_batch_threshold, self.max_tree_rows
        )
        self.query_len_support = QueryLenSupport.VARLEN

    def build_for_cudagraph_capture(self: Any, common_attn_metadata: Any) -> Any:
        """Capture multi-row passes with the tree path."""
        upstream: Any = super()
        self._capturing = True
        try:
            return upstream.build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        """Build the backend's metadata, then fill ``decode.tree``."""
        upstream: Any = super()
        metadata = upstream.build(common_prefix_len, common_attn_metadata, fast_build)
        state = get_state()
        if state is None or metadata.decode is None:
            return metadata
        active = self._is_tree_pass(state, common_attn_metadata)
        if active or self.attach_always:
            tree = self._build_tree(state, metadata, common_attn_metadata)
            tree.active = active
            tree.schedule = self.schedule_prefix(tree, metadata)
            metadata.decode.tree = tree
        return metadata

    def _is_tree_pass(self: Any, state: TreeAttnState, common: Any) -> bool:
        if self.tree_role == "draft":
            return True
        if self._capturing:
            return bool(common.max_query_len > 1) and state.shape.is_tree
        return state.verify_active

    def _build_tree(
        self: Any, state: TreeAttnState, metadata: Any, common: Any
    ) -> TreeAttnMetadata:
        if self.tree_role == "draft":
            num_reqs = metadata.num_decodes
            return TreeAttnMetadata(
                prefix_lens=common.seq_lens[:num_reqs],
                query_start_loc=common.query_start_loc[: num_reqs + 1],
                row_masks=state.buffers.scratch_masks[: metadata.num_decode_tokens],
                suffix_start=state.scratch_start[:num_reqs],
                suffix_slots=state.scratch_slots,
                max_suffix=state.shape.num_scratch_rows,
                max_query_len=min(common.max_query_len, self.max_tree_rows),
                max_prefix_len=common.max_seq_len,
                role="draft",
            )
        num_reqs, num_rows, max_query_len = self._find_trees(state, metadata, common)
        query_start_loc = common.query_start_loc[: num_reqs + 1]
        prefix_lens = state.prefix_lens[:num_reqs]
        torch.sub(common.seq_lens[:num_reqs], query_start_loc[1:], out=prefix_lens)
        # Padded requests have neither rows nor tokens.
        prefix_lens.add_(query_start_loc[:-1]).clamp_(min=0)
        return TreeAttnMetadata(
            prefix_lens=prefix_lens,
            query_start_loc=query_start_loc,
            row_masks=state.buffers.row_masks[:num_rows],
            suffix_start=query_start_loc[:-1],
            suffix_slots=common.slot_mapping,
            max_suffix=min(max_query_len, self.max_tree_rows),
            max_query_len=max_query_len,
            max_prefix_len=common.max_seq_len,
            rest=None
            if num_reqs == metadata.num_decodes
            else self.build_rest(metadata, common, num_reqs, num_rows),
        )

    def _find_trees(
        self: Any, state: TreeAttnState, metadata: Any, common: Any
    ) -> tuple[int, int, int]:
        """Requests, rows and longest query of the pass up to the widest tree.

        vLLM puts requests with drafts first, so what is behind are short prefills.
        """
        num_reqs, num_rows = metadata.num_decodes, metadata.num_decode_tokens
        longest = min(common.max_query_len, self.reorder_batch_threshold)
        ragged = state.ragged_query_len
        # A graph for batches that share is captured with the longest query of all.
        longest = max(longest, ragged)
        if longest <= self.max_tree_rows:
            return num_reqs, num_rows, longest
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        num_reqs = next(
            (r for r, n in enumerate(lengths) if n > self.max_tree_rows), num_reqs
        )
        longest = max(lengths[:num_reqs], default=0)
        return num_reqs, starts[num_reqs], max(longest, ragged)

    def build_rest(
        self: Any, metadata: Any, common: Any, num_reqs: int, num_rows: int
    ) -> Any:
        """Decode metadata of the requests behind the first ``num_reqs``."""
        raise NotImplementedError(
            f"{type(self).__name__} keeps short prefills on its decode path "
            f"({metadata.num_decode_tokens - num_rows} rows of this pass) and must "
            "implement build_rest."
        )

    def schedule_prefix(self, tree: TreeAttnMetadata, metadata: Any) -> Any:
        """Return what ``forward_prefix`` needs as ``tree.schedule``; None: nothing."""
        del tree, metadata
        return None


class TreeImplMixin:
    """MLA impl that serves tree rows; goes before the backend's impl."""

    scratch: torch.Tensor | None = None
    """Draft layers: [num_blocks, SCRATCH_BLOCK_SIZE, head_size], KV of the nodes run
    through this layer, in the dtype of its paged cache."""

    def do_kv_cache_update(
        self: Any,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write new KV rows; a draft level's rows go to the scratch cache.

        ``*args`` differ between vLLM 0.32 and 0.33.
        """
        upstream: Any = super()
        state = get_state()
        if state is not None and state.drafting and kv_cache.numel() > 0:
            slot_mapping = state.slots_of_level(kv_c_normed.shape[0])
            kv_c_normed = kv_c_normed[: slot_mapping.shape[0]]
            k_pe = k_pe[: slot_mapping.shape[0]]
            kv_cache = self.allocate_scratch(kv_cache.dtype, kv_cache.device)
        upstream.do_kv_cache_update(
            kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs
        )

    def allocate_scratch(
        self: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the scratch cache, allocated on the first call.

        The first draft level that runs calls it; the speculator may do so earlier, so
        that memory profiling sees the cache. ``dtype`` is the paged cache's.
        """
        state = get_state()
        if state is None:
            raise RuntimeError(
                "The scratch cache was asked for before attention.base.set_state(); "
                "the runner sets the state when it creates its speculator."
            )
        if self.scratch is None or self.scratch.dtype != dtype:
            blocks = -(-state.scratch_slots.shape[0] // SCRATCH_BLOCK_SIZE)
            width = self.kv_lora_rank + self.qk_rope_head_dim
            self.scratch = torch.zeros(
                blocks, SCRATCH_BLOCK_SIZE, width, dtype=dtype, device=device
            )
        scratch: torch.Tensor = self.scratch
        return scratch

    def forward_mqa(
        self: Any,
        # (q_nope [num_rows, H, Lkv], q_pe [num_rows, H, R]) or both concatenated
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        # [num_blocks, block_size, Lkv + R]
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the rows on the decode path: ``[num_rows, H, Lkv]``."""
        tree: TreeAttnMetadata | None = getattr(attn_metadata.decode, "tree", None)
        if tree is None:
            upstream: Any = super()
            return upstream.forward_mqa(q, kv_cache, attn_metadata, layer)  # type: ignore[no-any-return]
        is_draft_prefill = tree.role == "verify" and getattr(
            layer, "is_draft_layer", False
        )
        if is_draft_prefill or not tree.active:
            return self.forward_causal(q, kv_cache, tree, attn_metadata, layer)  # type: ignore[no-any-return]
        if tree.rest is None:
            return self.forward_tree(q, kv_cache, tree, attn_metadata, layer), None
        return self._forward_mixed(q, kv_cache, tree, attn_metadata, layer), None

    def _forward_mixed(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> torch.Tensor:
        """Trees in front, short prefills behind them on the stock path."""
        upstream: Any = super()
        assert tree.row_masks is not None
        num_rows = len(tree.row_masks)
        q_nope, q_pe = self.split_query(q)
        parts = []
        if num_rows:
            rows = (q_nope[:num_rows], q_pe[:num_rows])
            parts.append(self.forward_tree(rows, kv_cache, tree, attn_metadata, layer))
        behind = dataclasses.replace(attn_metadata, decode=tree.rest)
        rest, _ = upstream.forward_mqa(
            (q_nope[num_rows:], q_pe[num_rows:]), kv_cache, behind, layer
        )
        return torch.cat([*parts, rest])

    def forward_causal(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stock path, for draft prefills and passes without drafts."""
        del tree
        upstream: Any = super()
        return upstream.forward_mqa(q, kv_cache, attn_metadata, layer)  # type: ignore[no-any-return]

    def forward_tree(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> torch.Tensor:
        """Prefix by the backend's kernel, then suffix and merge in one launch."""
        q_nope, q_pe = self.split_query(q)
        out, lse = self.forward_prefix(
            q_nope, q_pe, kv_cache, tree, attn_metadata, layer
        )
        return self.attend_suffix(q_nope, q_pe, kv_cache, tree, out, lse, layer)  # type: ignore[no-any-return]

    def split_query(
        self: Any, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the latent and the RoPE part of the query; nothing is copied."""
        if isinstance(q, tuple):
            return q
        return q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]

    def forward_prefix(
        self,
        # [num_rows, H, Lkv]
        q_nope: torch.Tensor,
        # [num_rows, H, R]
        q_pe: torch.Tensor,
        # [num_blocks, block_size, Lkv + R]
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every row to all ``tree.prefix_lens`` tokens, without a mask.

        Returns the output ``[num_rows, H, Lkv]``, which the caller may overwrite, and
        the natural-log log-sum-exp: ``[num_rows, H]`` of any strides, or
        ``[num_reqs, H, max_query_len]``. Both are ignored where the prefix is empty.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement forward_prefix or forward_tree."
        )

    def attend_suffix(
        self: Any,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        tree: TreeAttnMetadata,
        # [num_rows, H, Lkv], overwritten
        out: torch.Tensor,
        lse: torch.Tensor,
        layer: Any,
    ) -> torch.Tensor:
        """Merge the suffix rows into ``out``, in place."""
        from vllm_mtp.kernels.tree_attention import tree_suffix_attention

        cache = self.suffix_cache(kv_cache, tree)
        quantized = cache.element_size() == 1
        merged: torch.Tensor = tree_suffix_attention(
            (q_nope, q_pe),
            cache,
            cache[..., : self.kv_lora_rank],
            tree.query_start_loc,
            tree.row_masks,
            tree.suffix_start,
            tree.suffix_slots,
            tree.max_suffix,
            out,
            lse,
            self.scale,
            max_query_len=tree.max_query_len,
            prefix_lens=tree.prefix_lens,
            q_scale=layer._q_scale if q_nope.element_size() == 1 else None,
            k_scale=layer._k_scale if quantized else None,
            out=out,
        )
        return merged

    def suffix_cache(
        self: Any, kv_cache: torch.Tensor, tree: TreeAttnMetadata
    ) -> torch.Tensor:
        """The cache that ``tree.suffix_slots`` index, ``[*, block_size, Lkv + R]``."""
        if tree.role == "verify":
            return kv_cache
        scratch: torch.Tensor | None = self.scratch
        if scratch is None:
            raise RuntimeError(
                "A draft level ran before its KV was written to the scratch cache: "
                "set TreeAttnState.drafting around the level, and give the draft layer "
                "a slot mapping (any), or vLLM skips do_kv_cache_update."
            )
        return scratch.view(kv_cache.dtype)


TREE_BACKENDS = {
    "FLASH_ATTN_MLA": "vllm_mtp.attention.flash_attn_mla.TreeFlashAttnMLABackend",
    "FLASHMLA": "vllm_mtp.attention.flashmla.TreeFlashMLABackend",
    "TRITON_MLA": "vllm_mtp.attention.triton_mla.TreeTritonMLABackend",
    "CPU_MLA": "vllm_mtp.attention.cpu.TreeCPUMLABackend",
    "AMX_MLA": "vllm_mtp.attention.cpu.TreeAMXMLABackend",
}
"""Upstream's backend name -> the subclass that takes its place."""


def register_tree_backends() -> None:
    """Put the tree-aware subclasses in place; idempotent, imports no kernels."""
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    for name, path in TREE_BACKENDS.items():
        register_backend(AttentionBackendEnum[name], path)
