"""Tree-aware stand-ins for vLLM's penalties and bad words.

They take the place of the originals in ``Sampler.logits_processors``, keep the
originals' per-request state, and only replace how a row's history is found. Processors
of others stay, and say which requests they need chains for.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.kernels.tree_history import (
    gather_ancestors,
    mask_bad_words,
    penalize_ancestors,
)


class _TreeProcessor(LogitsProcessor):  # type: ignore[misc]
    """Everything but ``apply`` is the original's."""

    def __init__(self, original: Any, tree: TreeBuffers) -> None:
        self.original = original
        self.tree = tree

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return bool(self.original.add_request(req_idx, sampling_params))

    def apply_staged_writes(self) -> None:
        self.original.apply_staged_writes()

    def ancestors(self, ctx: Any) -> torch.Tensor:
        """``[num_rows, S]`` int64 tokens on each row's path, own first, -1: none."""
        rows = ctx.expanded_idx_mapping.shape[0]
        found = torch.empty(
            (rows, self.tree.shape.num_steps),
            dtype=torch.int64,
            device=ctx.input_ids.device,
        )
        gather_ancestors(
            self.tree,
            ctx.expanded_idx_mapping,
            ctx.expanded_local_pos,
            ctx.input_ids,
            found,
        )
        return found


class TreePenalties(_TreeProcessor):
    """Presence, frequency and repetition penalties over prompt, output, ancestors."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        state = self.original
        if not state.use_penalty[ctx.idx_mapping_np].any():
            return logits
        ancestors = self.ancestors(ctx)
        raw = logits.gather(1, ancestors.clamp(min=0))
        # Upstream's kernel counts the rows before a row; at row 0 there are none.
        alone = replace(
            ctx, expanded_local_pos=torch.zeros_like(ctx.expanded_local_pos)
        )
        logits = state.apply(logits, alone)
        penalize_ancestors(
            logits,
            raw,
            ancestors,
            ctx.expanded_idx_mapping,
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.output_bin_counts,
        )
        return logits


class TreeBadWords(_TreeProcessor):
    """Bad words over the committed output and the row's ancestors."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        state = self.original
        most = int(state.num_bad_words.np[ctx.idx_mapping_np].max())
        if most == 0:
            return logits
        mask_bad_words(
            logits,
            self.ancestors(ctx),
            ctx.expanded_idx_mapping,
            state.bad_word_token_ids.gpu,
            state.bad_word_offsets.gpu,
            state.num_bad_words.gpu,
            state.req_states.all_token_ids.gpu,
            state.req_states.prompt_len.gpu,
            state.req_states.total_len.gpu,
            most,
        )
        return logits


class WatchedProcessor(LogitsProcessor):  # type: ignore[misc]
    """A processor of others, applied as it is; notes the requests that it claims.

    It may read a row's history off the rows before it, so these requests draft chains.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.claimed: set[int] = set()
        """Slots of the requests whose logits it modifies."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        claims = bool(self.original.add_request(req_idx, sampling_params))
        (self.claimed.add if claims else self.claimed.discard)(req_idx)
        return claims

    def apply_staged_writes(self) -> None:
        self.original.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        processed: torch.Tensor = self.original.apply(logits, ctx)
        return processed


def make_history_tree_aware(sampler: Any, tree: TreeBuffers) -> None:
    """Swap the processors that look back; the sampler's other state stays."""

    def stand_in(processor: Any) -> Any:
        if type(processor) is PenaltiesState:
            return TreePenalties(processor, tree)
        if type(processor) is BadWordsState:
            return TreeBadWords(processor, tree)
        known = type(processor) is LogitBiasState
        return processor if known else WatchedProcessor(processor)

    sampler.logits_processors = [stand_in(p) for p in sampler.logits_processors]


def is_claimed(sampler: Any, slot: int) -> bool:
    """Whether a logits processor of others modifies the logits of this request."""
    watched = (p for p in sampler.logits_processors if isinstance(p, WatchedProcessor))
    return any(slot in p.claimed for p in watched)
