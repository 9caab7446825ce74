"""vLLM's V2 model runner with trees: rows in, verify, commit.

A step: ``prepare_attn`` gives tree rows their positions and masks, the target runs,
``sample`` verifies and commits, the speculator drafts. After the commit the step looks
exactly like a chain step with rejected tokens, and upstream code goes on.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_mtp import compat
from vllm_mtp.attention.base import TREE_BACKENDS, TreeBuilderMixin
from vllm_mtp.auto.ladder import Rung, graph_batches, shared_graphs
from vllm_mtp.auto.profile import load_or_measure, repeat_some
from vllm_mtp.auto.sharing import NodeBudget
from vllm_mtp.config import SettingsError
from vllm_mtp.history import is_claimed
from vllm_mtp.kernels.kv_commit import build_kv_table, commit_kv, commit_rows
from vllm_mtp.kernels.tree_rows import prepare_tree_rows
from vllm_mtp.metrics.counts import note_of
from vllm_mtp.metrics.timing import PhaseTimer
from vllm_mtp.requests import needs_chain
from vllm_mtp.speculator import MTPTreeSpeculator
from vllm_mtp.totals import AcceptanceTotals
from vllm_mtp.verifier import TreeVerifier

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Upstream
else:
    _Upstream = object


class TreeRunnerMixin(_Upstream):  # type: ignore[misc]
    """What a V2 runner needs for trees, on any device."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        with compat.speculator_factory(
            lambda config, device, req_states: MTPTreeSpeculator(config, device)
        ):
            super().__init__(vllm_config, device)
        self.tree = self.speculator.tree
        self.tree_attn = self.speculator.tree_attn
        self.timer = self.speculator.timer = self._build_timer()
        # Of the requests that came with the step at hand.
        self.new_chains: tuple[str, ...] = ()
        # While step costs are measured, dummy rows count as real ones.
        self.is_measuring = False
        # Where a batch may share its nodes.
        self.budget: NodeBudget | None = None

    def _build_timer(self) -> PhaseTimer | None:
        """Times phases for the metrics or the trace; None when neither asks."""
        config = compat.read_config(self.vllm_config)
        if not config.timing and config.trace is None:
            return None
        return PhaseTimer(self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.rejection_sampler = TreeVerifier(
            self.sampler, self.speculative_config, self.device, self.tree
        )
        self.totals = AcceptanceTotals(self.device)
        self.collector = self._build_collector()
        if self.collector is not None:
            self.collector.timer = self.timer
            collect = functools.partial(self.collector.collect, self.tree)
            self.rejection_sampler.observer = collect

    def _build_collector(self) -> Any:
        """The trace's collector on the first rank of each replica, if asked for."""
        settings = compat.read_config(self.vllm_config).trace
        if settings is None or get_tp_group().rank_in_group != 0:
            return None
        from vllm_mtp.trace.collector import TreeCollector
        from vllm_mtp.trace.settings import TraceSettings

        if self.dp_size > 1:
            settings = {**settings, "path": f"{settings['path']}.dp{self.dp_rank}"}
        return TreeCollector(TraceSettings(**settings), self.vllm_config)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        ladder = self.speculator.ladder
        if ladder is None:
            super().initialize_kv_cache(*args, **kwargs)
        else:
            with compat.graph_widths([r.num_nodes for r in ladder if not r.is_shared]):
                super().initialize_kv_cache(*args, **kwargs)
            self._choose_graphs(ladder)
        self._require_tree_backends()
        caches, groups = compat.target_kv_layers(
            self.vllm_config,
            self.kv_cache_config,
            self.speculator.draft_attn_layer_names,
        )
        self.kv_table = build_kv_table(caches, groups)

    def _choose_graphs(self, ladder: tuple[Rung, ...]) -> None:
        """Those of every rung, shared ones too, for few batch sizes."""
        budget = NodeBudget(
            ladder,
            self.tree,
            self.req_states,
            self.input_buffers.query_start_loc,
            get_max_chunk_logits(self.vocab_size),
        )
        compat.keep_graphs(
            self.cudagraph_manager,
            graph_batches(self.max_num_reqs),
            shared_graphs(ladder, self.max_num_reqs),
            max_query_len=budget.widest + 1,
        )
        self.budget = budget if budget.widest else None

    def _require_tree_backends(self) -> None:
        """Refuse a backend that would attend to tree rows as if they were a chain."""
        if not self.tree.shape.is_tree:
            return
        for groups in self.attn_groups + self.speculator.attn_groups:
            for group in groups:
                if not isinstance(group.get_metadata_builder(), TreeBuilderMixin):
                    raise SettingsError(
                        f"mtp_tree: the attention backend {group.backend.get_name()} "
                        "cannot attend to trees. Use --attention-backend with one of "
                        f"{', '.join(TREE_BACKENDS)}, or topk=1 for chains."
                    )

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture the graphs; with ``"shape": "auto"`` time them too."""
        size: int = super().capture_model(profile_only=profile_only)
        if self.speculator.ladder is not None and not profile_only:
            self._measure_costs()
        return size

    def _measure_costs(self) -> None:
        group = get_tp_group()
        load_or_measure(
            self.vllm_config,
            self.speculator.ladder,
            self._run_dummy_step,
            is_first_rank=group.rank_in_group == 0,
            agree=lambda answer: bool(group.broadcast_object(answer, src=0)),
        )

    def _run_dummy_step(self, rung: Rung, batch: int, context: int) -> None:
        """One decode step of placeholder requests: target, head and drafts.

        Their tokens are random, since equal ones would all go to the same experts, but
        for some that a request repeats. Not timed is what comes after the head, a few
        passes over the logits. Where nodes are shared, every request gets as many here.
        """
        own: Any = self.decode_query_len  # type: ignore[has-type]
        self.decode_query_len = rung.num_nodes + 1
        self.speculator.dummy_nodes = rung.num_drafts
        self.is_measuring = True
        try:
            rows = batch * (rung.num_nodes + 1)
            hidden_states, _ = self._dummy_run(
                rows, uniform_decode=True, context_len=context, randomize_inputs=True
            )
            self.model.compute_logits(hidden_states[:rows])
        finally:
            self.decode_query_len, self.speculator.dummy_nodes = own, None
            self.is_measuring = False

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        new_reqs = scheduler_output.scheduled_new_reqs
        slots = [self.req_states.req_id_to_index[new.req_id] for new in new_reqs]
        chains = {
            (slot, new.req_id): needs_chain(new.sampling_params)
            or is_claimed(self.sampler, slot)
            for slot, new in zip(slots, new_reqs, strict=True)
            if new.sampling_params is not None
        }
        self.speculator.add_requests((slot, c) for (slot, _), c in chains.items())
        self.new_chains = tuple(req_id for (_, req_id), c in chains.items() if c)
        if self.collector is not None:
            self.collector.add_requests(scheduler_output.scheduled_new_reqs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream's, with adaptive verification where requests share nodes."""
        budget = self.budget
        if budget is not None and not budget.serves(scheduler_output):
            budget = None
        self.adaptive_verification = budget
        self.tree_attn.ragged_query_len = budget.widest + 1 if budget else 0
        return super().execute_model(scheduler_output, *args, **kwargs)

    def prepare_attn(self, input_batch: Any) -> Any:
        """Slots from linear positions as upstream, then tree positions and masks."""
        if self.timer is not None:
            self.timer.begin()
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        has_drafts = input_batch.num_draft_tokens > 0
        # The rows of a chain are causal and in place: stock attention, no commit.
        self.tree_attn.verify_active = has_drafts and self.tree.shape.is_tree
        if self.tree_attn.verify_active:
            prepare_tree_rows(
                self.tree,
                input_batch.idx_mapping,
                input_batch.query_start_loc,
                input_batch.cu_num_logits,
                self.req_states.prefill_len.gpu,
                input_batch.positions,
            )
            self.verify_slots = slot_mappings
        return block_tables, slot_mappings

    def prepare_dummy_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.tree_attn.verify_active = False
        if self.is_measuring:
            # Rows marked as padding skip their experts.
            input_batch.is_padding.fill_(False)
            repeat_some(input_batch.input_ids, input_batch.num_reqs)
        return super().prepare_dummy_attn(input_batch, *args, **kwargs)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Memory profiling: hold what the largest verify pass holds while sampling.

        That is a row of logits for every node, and the float32 copy of one chunk.
        """
        rows = min(self.max_num_reqs * self.tree.shape.num_rows, self.max_num_tokens)
        hidden = hidden_states.new_zeros(rows, hidden_states.shape[1])
        logits = self.model.compute_logits(hidden)
        chunk = logits[: get_max_chunk_logits(logits.shape[1])].float()
        super()._dummy_sampler_run(hidden_states)
        del logits, chunk

    def sample(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> Any:
        """Verify (``TreeVerifier``), then commit the accepted paths."""
        if self.timer is not None:
            self.timer.mark("verifying")
        output = super().sample(hidden_states, input_batch, grammar_output)
        if input_batch.num_draft_tokens > 0:
            num_drafted = int((input_batch.num_draft_tokens_per_req > 0).sum())
            self.totals.add(num_drafted, num_sampled=output[1])
        if self.tree_attn.verify_active:
            self.commit(hidden_states, input_batch, num_accepted=output[1])
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """A note for the scheduler's counts goes with the output."""
        output = super().sample_tokens(grammar_output)
        if output is not None:
            note = note_of(
                self.tree.shape.topk,
                self.speculator.rung_drafted,
                new_chains=self.new_chains,
                phase_us=self.timer.take_us() if self.timer is not None else {},
            )
            compat.hang_pass_note(output, note)
        return output

    def shutdown(self) -> None:
        if self.collector is not None:
            self.collector.writer.close()
        super().shutdown()

    def commit(
        self,
        hidden_states: torch.Tensor,
        input_batch: Any,
        # [num_reqs] int32 rows on the accepted path, root included; 0: none
        num_accepted: torch.Tensor,
    ) -> None:
        """Move KV, hidden states, ids along the path; make positions linear again."""
        path = self.tree.path[: input_batch.num_reqs]
        starts = input_batch.query_start_loc
        commit_kv(self.kv_table, self.verify_slots, path, num_accepted, starts)
        commit_rows(
            path,
            num_accepted,
            starts,
            hidden_states,
            input_batch.input_ids,
            input_batch.positions,
        )


class TreeModelRunner(TreeRunnerMixin, GPUModelRunner):  # type: ignore[misc]
    """The GPU runner with trees."""
