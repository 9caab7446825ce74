"""Main path, part 2: let the target draw a token per row, then walk the tree.

Takes the place of vLLM's rejection sampler. The draft's probabilities are never looked
at: at every row the target's own sampler draws the token it would draw there without
speculation, and the walk follows the drawn tokens (docs/verification.md).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.history import make_history_tree_aware
from vllm_mtp.kernels.tree_verify import verify_tree

Observer = Callable[[InputBatch, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Told of each pass: batch, tokens fed and drawn by logits row, number emitted."""


class TreeVerifier(RejectionSampler):  # type: ignore[misc]
    """Verifies one packed tree per request with the target's own sampler."""

    def __init__(
        self, sampler: Any, spec_config: Any, device: torch.device, tree: TreeBuffers
    ) -> None:
        super().__init__(sampler, spec_config, device)
        # The fused samplers draw from a noise of their own; only the Gumbel draw is a
        # function of request seed, position and token, which trees are coupled to.
        sampler.use_flashinfer = False
        make_history_tree_aware(sampler, tree)
        self.tree = tree
        self.observer: Observer | None = None

    def __call__(
        self,
        # [num_logits, V]
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        # [num_logits] bool, rows whose token the request's grammar forbids
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample every row, accept a path per request, emit its tokens.

        ``buffers.path`` holds the accepted rows afterwards. ``draft_logits`` is unused
        and part of vLLM's signature.
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        fed = input_batch.input_ids[input_batch.logits_indices]
        positions = input_batch.positions[input_batch.logits_indices]
        drafted = _mask_drafts(fed, input_batch, invalid_drafts)

        sampled = self._sample_rows(logits, fed, positions, input_batch)
        emitted = sampled.new_empty(input_batch.num_reqs, self.tree.shape.num_rows)
        num_emitted = torch.empty(
            input_batch.num_reqs, dtype=torch.int32, device=sampled.device
        )
        verify_tree(
            self.tree,
            sampled,
            drafted,
            input_batch.idx_mapping,
            input_batch.cu_num_logits,
            emitted,
            num_emitted,
        )
        logprobs = self._path_logprobs(logits, fed, positions, emitted, input_batch)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_emitted,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        if self.observer is not None:
            self.observer(input_batch, drafted, sampled, num_sampled)
        return SamplerOutput(
            sampled_token_ids=emitted,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample_rows(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        positions: torch.Tensor,
        batch: InputBatch,
    ) -> torch.Tensor:
        """Draw one token per logits row: ``[num_logits]`` int64.

        Chunked by whole requests, since sampling parameters are applied to a float32
        copy of the rows.
        """
        drawn = [
            self.sampler.sample(*self._row_args(logits, fed, positions, batch, s, e))[0]
            for s, e in self._chunks(logits, batch)
        ]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def _chunks(self, logits: torch.Tensor, batch: InputBatch) -> Any:
        limit = get_max_chunk_logits(logits.shape[1])
        return request_chunks(batch.cu_num_logits_np.tolist(), limit)

    def _row_args(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        positions: torch.Tensor,
        batch: InputBatch,
        start: int,
        end: int,
    ) -> tuple[Any, ...]:
        """Arguments of ``Sampler.sample`` for the requests ``start`` to ``end``."""
        rows = slice(batch.cu_num_logits_np[start], batch.cu_num_logits_np[end])
        return (
            logits[rows],
            batch.expanded_idx_mapping[rows],
            batch.idx_mapping[start:end],
            batch.idx_mapping_np[start:end],
            positions[rows],
            fed[rows],
            batch.expanded_local_pos[rows],
            batch.seq_lens_cpu_upper_bound.numpy()[start:end],
        )

    def _path_logprobs(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        positions: torch.Tensor,
        emitted: torch.Tensor,
        batch: InputBatch,
    ) -> LogprobsTensors | None:
        """Log-probabilities in path order, one row per emitted token."""
        # Unlike vLLM's rejection sampler, requests for logprob_token_ids included.
        wanted = self.sampler.get_logprobs_dims(batch.idx_mapping_np)
        if wanted is None:
            return None
        num_logprobs, max_token_ids = wanted
        if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            chunks = [
                self.sampler.apply_sampling_params(
                    *self._row_args(logits, fed, positions, batch, start, end)
                )
                for start, end in self._chunks(logits, batch)
            ]
            logits = torch.cat(chunks)
        rows, tokens = self._path_rows(emitted, batch)
        expanded = logits.shape[0] != batch.num_reqs
        return compute_topk_scores(
            logits[rows],
            num_logprobs,
            tokens,
            batch.cu_num_logits.clone() if expanded else None,
            self.sampler.logprob_token_ids_state,
            batch.expanded_idx_mapping,
            max_token_ids,
            logits_mode=self.sampler.logprobs_mode.endswith("_logits"),
        )

    def _path_rows(
        self, emitted: torch.Tensor, batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Path order: for each logits row the row in its place, and what it emitted.

        Past the end of a path the row is any of the request's and the token is 0.
        """
        reqs = _requests_of_rows(batch)
        place = batch.expanded_local_pos.long()
        rows = batch.cu_num_logits[reqs].long() + self.tree.path[reqs, place].long()
        return rows, emitted[reqs, place]


def request_chunks(starts: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole requests of at most ``limit`` rows, or of one request.

    ``starts`` is the first row of each request, and the number of rows at the end.
    """
    first = 0
    for req in range(1, len(starts)):
        if starts[req] - starts[first] > limit and req - 1 > first:
            yield first, req - 1
            first = req - 1
    yield first, len(starts) - 1


def _mask_drafts(
    # [num_logits]
    fed: torch.Tensor,
    batch: InputBatch,
    invalid_drafts: torch.Tensor | None,
) -> torch.Tensor:
    """Tokens fed into the rows as int64, with -1 where a row must not be accepted.

    Rows of a request still in its prefill are placeholders: drafts are only proposed
    after the first sampled token.
    """
    drafted = fed.long()
    if invalid_drafts is not None:
        drafted = drafted.masked_fill(invalid_drafts, -1)
    drafts_per_req = batch.num_draft_tokens_per_req
    placeholder = batch.is_prefilling_np & (drafts_per_req > 0)
    if placeholder.any():
        by_request = async_tensor_h2d(placeholder, device=fed.device)
        drafted = drafted.masked_fill(by_request[_requests_of_rows(batch)], -1)
    return drafted


def _requests_of_rows(batch: InputBatch) -> torch.Tensor:
    """The request of every logits row, ``[num_logits]``.

    By the device's counts: the host's are equal shares where a batch shares its nodes.
    """
    starts = batch.cu_num_logits
    reqs = torch.arange(batch.num_reqs, device=starts.device)
    return reqs.repeat_interleave(
        starts.diff(), output_size=int(batch.cu_num_logits_np[-1])
    )
