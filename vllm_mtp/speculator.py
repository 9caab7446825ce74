"""Main path, part 1: draft one tree per request with the MTP layer.

``propose`` = draft prefill over the accepted tokens (upstream's own, it yields the
root's children) -> S - 1 levels, each one MTP pass over the F best nodes of every
request -> pack the best N nodes of all. Levels and packing replay as one CUDA graph.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d, kv_cache_dtype_str_to_dtype
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

from vllm_mtp import compat
from vllm_mtp.attention.base import TreeImplMixin, build_attn_state, set_state
from vllm_mtp.auto.ladder import OFF, Rung, graph_batches, ladder_of, rung_of
from vllm_mtp.buffers import build_tree_buffers
from vllm_mtp.config import SettingsError, candidates
from vllm_mtp.kernels.tree_expand import expand_tree
from vllm_mtp.kernels.tree_pack import pack_tree
from vllm_mtp.kernels.tree_topk import build_topk_workspace, tree_topk
from vllm_mtp.metrics.timing import PhaseTimer
from vllm_mtp.models import load_mtp_layer

DRAFT_WARMTH = 1.1
"""Drafts are ranked at so many times the request's temperature. A draft's logits are
noisy estimates of the target's, which on average lie closer together
(docs/verification.md, drafting with the target's noise)."""


class MTPTreeSpeculator(MTPSpeculator):  # type: ignore[misc]
    """Drafts EAGLE-2 dynamic trees with the one MTP layer of a DeepSeek checkpoint."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = compat.read_config(vllm_config)
        self.shape = config.shape
        self.ladder = ladder_of(vllm_config, config) if config.auto else None
        self.rungs = self.ladder or (rung_of(config.shape),)
        # One fused graph of all levels for every ``Rung.levels``; none before graphs
        # are set up.
        self.level_graphs: dict[tuple[int, int], SpeculatorCudaGraphManager] = {}
        self.skips_head = self.is_capturing = False
        # Nodes of a dummy run's drafts; None: all. Set while step costs are measured.
        self.dummy_nodes: int | None = None
        self._check_sizes()
        self.tree = build_tree_buffers(
            self.shape, self.max_num_reqs, self.max_num_tokens, device
        )
        frontiers = {rung.frontier for rung in self.rungs}
        self.tree_attn = build_attn_state(
            self.tree, self.max_num_reqs, device, frontiers
        )
        set_state(self.tree_attn)
        # Draft with the noise of the target's sampler; off only to measure what it
        # brings (benchmarks/acceptance.py).
        self.coupled, self.warmth = True, DRAFT_WARMTH
        # For the metrics: set by the runner; the rung last drafted.
        self.timer: PhaseTimer | None = None
        self.rung_drafted = OFF
        self.topk_workspace = build_topk_workspace(
            self.max_num_reqs * self.shape.frontier, self.vocab_size, device
        )
        # [max_num_reqs, H] what the draft prefill feeds back, by batch row
        self.root_hidden = torch.zeros_like(self.hidden_states[: self.max_num_reqs])
        # [max_num_reqs] position of the last prefilled token, by batch row
        self.root_positions = torch.zeros(
            self.max_num_reqs, dtype=torch.int64, device=device
        )
        # F -> [max_num_reqs + 1] int32, first query row of each request in a level
        starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self.level_starts = {frontier: frontier * starts for frontier in frontiers}

    def _check_sizes(self) -> None:
        rows = self.max_num_reqs * self.shape.frontier
        if rows > self.max_num_tokens:
            raise SettingsError(
                f"mtp_tree: max_num_batched_tokens={self.max_num_tokens} is too small "
                f"for a draft level of {rows} rows (max_num_seqs="
                f"{self.max_num_reqs} x frontier={self.shape.frontier}). Raise "
                f"max_num_batched_tokens to at least {rows}, or lower max_num_seqs or "
                "frontier (topk, unless given)."
            )

    # --- set-up ---------------------------------------------------------------------

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        model = load_mtp_layer(target_model, self.vllm_config)
        self._allocate_scratch(model)
        return model

    def _allocate_scratch(self, model: nn.Module) -> None:
        """Scratch caches of the MTP layer, before memory for the paged KV is sized."""
        dtype = kv_cache_dtype_str_to_dtype(
            self.vllm_config.cache_config.cache_dtype, self.vllm_config.model_config
        )
        for module in model.modules():
            impl = getattr(module, "impl", None)
            if isinstance(impl, TreeImplMixin):
                impl.allocate_scratch(dtype, self.device)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.tree_role = "draft"

    def _configure_decode_metadata_update(self) -> None:
        # Upstream's in-place update is for chains; levels share one prefix length.
        self.supports_decode_metadata_update = False

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        self.level_graphs = {
            levels: SpeculatorCudaGraphManager(
                self.vllm_config,
                self.device,
                CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
                decode_query_len=levels[1],
            )
            for levels in sorted({r.levels for r in self.rungs if r.num_nodes})
        }
        self.decode_cudagraph_manager = self.level_graphs[self.rungs[-1].levels]
        if self.ladder is not None:
            batches = graph_batches(self.max_num_reqs)
            for manager in (
                self.prefill_cudagraph_manager,
                *self.level_graphs.values(),
            ):
                compat.keep_graphs(manager, batches)

    def capture(self) -> None:
        self.is_capturing = True
        super().capture()
        self.is_capturing = False
        for levels, manager in self.level_graphs.items():
            if manager is not self.decode_cudagraph_manager:
                manager.capture(
                    functools.partial(self._generate_draft, levels=levels),
                    self.model_state,
                    self.input_buffers,
                    self.block_tables,
                    self.attn_groups,
                    self.kv_cache_config,
                    progress_bar_desc=f"Capturing draft levels to depth {levels[0]}",
                )

    def add_requests(self, requests: Iterable[tuple[int, bool]]) -> None:
        """Note which of the new ``(slot, is chain)`` draft chains."""
        slots = list(requests)
        if slots:
            index = async_tensor_h2d([s for s, _ in slots], device=self.device)
            value = async_tensor_h2d([chain for _, chain in slots], device=self.device)
            self.tree.chain_only[index] = value

    # --- the step -------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft a tree for every request of the batch.

        Takes vLLM's arguments. Returns the drafted tokens ``[num_reqs, N]`` int64 in
        row order; the tree's other tensors lie in ``self.tree`` by request slot.
        """
        wanted = kwargs.pop("num_speculative_tokens", None)
        if wanted is None:
            wanted = self.num_speculative_steps
            if self.dummy_nodes is not None:
                wanted = self.dummy_nodes
        self.rung_drafted = self._rung_of(wanted) if wanted > 0 else OFF
        if self.timer is not None:
            self.timer.mark("bookkeeping")
        if wanted > 0:
            self._draft_root_children(input_batch, *args, **kwargs)
            self._draft_levels(input_batch, self.rung_drafted.levels, **kwargs)
        else:
            self._only_read(input_batch, *args, **kwargs)
        if self.timer is not None:
            self.timer.mark("drafting")
            self.timer.end()
        drafted: torch.Tensor = self.draft_tokens[: input_batch.num_reqs]
        return drafted

    def _copy_request_inputs(self, *args: Any, **kwargs: Any) -> None:
        super()._copy_request_inputs(*args, **kwargs)
        self.temperature.mul_(self.warmth)

    def _draft_root_children(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Upstream's draft prefill, which ends in ``sample_draft``."""
        if self._has_headless_graph(input_batch):
            kwargs["is_profile"] = True  # runs eagerly
        super().propose(input_batch, *args, num_speculative_tokens=1, **kwargs)

    def _only_read(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the draft's KV complete while nothing is drafted, without the head.

        The first step verifies the last drafts, and graphs of its rows have the head.
        """
        if not self._has_headless_graph(input_batch):
            kwargs["is_profile"] = True  # runs eagerly
        self.skips_head = True
        try:
            super().propose(input_batch, *args, num_speculative_tokens=0, **kwargs)
        finally:
            self.skips_head = False

    def _has_headless_graph(self, input_batch: Any) -> bool:
        """One row a request: steps of ``"shape": "auto"`` that draft nothing."""
        rows: int = input_batch.num_tokens
        return self.ladder is not None and rows == input_batch.num_reqs

    def _prefill(self, num_reqs: int, num_tokens: int, *args: Any, **kw: Any) -> None:
        """As upstream's; graphs of one row a request are captured without the head."""
        one_row = self.ladder is not None and num_tokens == num_reqs
        if not (self.is_capturing and one_row):
            super()._prefill(num_reqs, num_tokens, *args, **kw)
            return
        self.skips_head = True
        super()._prefill(num_reqs, num_tokens, *args, **kw)
        self.skips_head = False

    def _rung_of(self, num_nodes: int) -> Rung:
        """What to run for so many drafts."""
        for rung in self.rungs:
            if rung.num_drafts == num_nodes:
                return rung
        return self.rungs[-1]

    def sample_draft(
        self,
        # [num_reqs, H]
        hidden_states: torch.Tensor,
        # [num_reqs] position before the token drafted
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """End of the draft prefill: the root's children, best first."""
        if self.skips_head:
            return self.tree.topk_ids[: hidden_states.shape[0], 0]
        logits = self.compute_draft_logits(hidden_states, 0)
        self._find_children(logits, idx_mapping, sample_src_positions, depth=0)
        return self.tree.topk_ids[: logits.shape[0], 0]

    def _find_children(
        self,
        # [num_rows, V]
        logits: torch.Tensor,
        # [num_reqs]
        idx_mapping: torch.Tensor,
        # [num_reqs]
        positions: torch.Tensor,
        depth: int,
    ) -> None:
        tree_topk(
            logits,
            self.tree.topk_ids,
            self.tree.topk_logprobs,
            idx_mapping,
            self.temperature if self.coupled else torch.zeros_like(self.temperature),
            self.seeds,
            positions,
            depth,
            self.topk_workspace,
            use_fp64=self.use_fp64_gumbel,
        )

    def _draft_levels(
        self,
        input_batch: Any,
        levels: tuple[int, int],
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        **unused: Any,
    ) -> None:
        """Run levels 1..S-1 and pack, as one graph where the batch size has one."""
        graphs, frontier = self.level_graphs.get(levels), levels[1]
        num_reqs = input_batch.num_reqs
        self._prepare_levels(num_reqs, frontier)
        sync, num_tokens = None, num_reqs * frontier
        if dp_sync_state is not None:
            sync, num_tokens = self._build_uniform_batch_dp_sync(
                dp_sync_state, num_reqs, num_query_per_req=frontier
            )
        batch_desc, sync = dispatch_cg_and_sync_dp(
            graphs,
            num_reqs,
            num_tokens,
            uniform_token_count=frontier,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
            dp_sync_state=sync,
        )
        attn_metadata = None
        if not (dummy_run and skip_attn_for_dummy_run):
            attn_metadata = self._build_uniform_attn_metadata(
                num_reqs=num_reqs,
                batch_desc=batch_desc,
                num_query_per_req=frontier,
                seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
                step=0,
            )
        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            assert graphs is not None
            graphs.run_fullgraph(batch_desc)
            return
        self._generate_draft(
            num_reqs,
            batch_desc.num_tokens,
            attn_metadata,
            None,
            sync.num_tokens_across_dp if sync is not None else None,
            batch_desc.cg_mode,
            levels=levels,
        )

    def _prepare_levels(self, num_reqs: int, frontier: int) -> None:
        """Lengths and row starts of a level; the same for every level of the step."""
        buffers = self.input_buffers
        positions = buffers.positions[:num_reqs]
        self.root_positions[:num_reqs].copy_(positions)
        # Every token up to the last prefilled one is in the draft's paged cache.
        torch.add(positions, 1, out=buffers.seq_lens[:num_reqs])
        buffers.seq_lens[num_reqs:].zero_()
        torch.clamp(
            self.level_starts[frontier],
            max=num_reqs * frontier,
            out=buffers.query_start_loc,
        )

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        levels: tuple[int, int] | None = None,
        **unused: Any,
    ) -> None:
        """The captured part: expand, run and search each level, then pack.

        Overrides upstream's chain step so that its ``capture`` records this instead.
        """
        num_steps, frontier = levels or self.rungs[-1].levels
        num_rows = num_reqs * frontier
        idx_mapping = self.idx_mapping[:num_reqs]
        self.root_hidden[:num_reqs].copy_(self.hidden_states[:num_reqs])
        hidden = self.root_hidden[:num_reqs]
        for depth in range(1, num_steps):
            self._expand(depth, frontier, idx_mapping, hidden)
            self._set_level_positions(num_reqs, depth, frontier)
            self._prepare_eplb_forward(num_rows)
            with self._level(depth, frontier, num_tokens_padded) as slots:
                for_logits, hidden = self._run_model(
                    num_tokens_padded,
                    attn_metadata,
                    slots if attn_metadata is not None else None,
                    num_tokens_across_dp,
                    cudagraph_runtime_mode,
                )
            logits = self.compute_draft_logits(for_logits[:num_rows], depth)
            self._find_children(
                logits, idx_mapping, self.sample_src_positions[:num_reqs], depth
            )
        self._expand(num_steps, frontier, idx_mapping, hidden)
        found = candidates(num_steps, self.shape.topk, frontier)
        if found < self.shape.num_candidates:
            # What larger trees left there.
            self.tree.cand_scores[:num_reqs, found:].fill_(float("-inf"))
        pack_tree(self.tree, idx_mapping, self.draft_tokens)

    @contextlib.contextmanager
    def _level(
        self, depth: int, frontier: int, num_tokens: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, the MTP layer writes its KV to the scratch rows of this depth.

        Yields the slots by layer: they only have to be there for vLLM to write KV.
        """
        state = self.tree_attn
        state.drafting, state.level, state.frontier = True, depth - 1, frontier
        slots = state.slots_of_level(num_tokens)
        try:
            yield dict.fromkeys(self.draft_attn_layer_names, slots)
        finally:
            state.drafting = False

    def _expand(
        self,
        depth: int,
        frontier: int,
        idx_mapping: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        expand_tree(
            self.tree,
            depth,
            idx_mapping,
            hidden,
            self.hidden_states,
            self.input_buffers.input_ids,
            frontier,
        )

    def _set_level_positions(self, num_reqs: int, depth: int, frontier: int) -> None:
        """A node of depth d is fed at the last prefilled position + d."""
        positions = (self.root_positions[:num_reqs] + depth).clamp_(
            max=self.max_model_len - 1
        )
        rows = self.input_buffers.positions[: num_reqs * frontier]
        rows.view(num_reqs, frontier).copy_(positions[:, None])
