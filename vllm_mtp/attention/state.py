"""What the attention of one worker shares: per-pass metadata and the worker's state.

Everything a captured graph reads is a persistent buffer; everything the host decides
(``verify_active``, ``drafting``, ``level``) is set alike at capture and at replay.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm_mtp.buffers import TreeBuffers
from vllm_mtp.config import TreeShape

Role = Literal["verify", "draft"]


@dataclass
class TreeAttnMetadata:
    """Added to ``attn_metadata.decode`` as ``tree`` when the pass holds tree rows.

    Every tensor is a view of a persistent buffer, so a captured graph can replay it.
    """

    # [num_reqs] int32, tokens before each request's first row; 0 for padded requests
    prefix_lens: torch.Tensor
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor
    # [num_rows] int64, ancestor bits of each row; None: every row is causal
    row_masks: torch.Tensor | None
    # [num_reqs] int32, start of each request in suffix_slots
    suffix_start: torch.Tensor
    # [*] int64, physical slots of suffix rows
    suffix_slots: torch.Tensor
    # suffix rows looked at: 1 + N when verifying, scratch rows when drafting
    max_suffix: int
    # longest query of the pass in rows (host); 1 + N or F in graphs
    max_query_len: int
    # upper bound of prefix_lens (host); the model length in graphs
    max_prefix_len: int
    # verify: the suffix lies in the layer's paged cache; draft: in its scratch cache
    role: Role = "verify"
    # False: attached for backends that serve the stock causal path with it
    active: bool = True
    # filled by backends that schedule ahead of time (FlashAttention 3, FlashMLA)
    schedule: Any = None
    # decode metadata of the requests behind the trees (short prefills); None: none
    rest: Any = None


@dataclass
class TreeAttnState:
    """What the attention of one worker shares; reached through ``get_state``.

    The runner sets ``verify_active`` before it builds a step's metadata; the
    speculator sets ``drafting`` and ``level`` around each draft level.
    """

    buffers: TreeBuffers

    # [max_num_reqs] int32, tokens before the root of each request being verified
    prefix_lens: torch.Tensor
    # [max_num_reqs] int32, first scratch slot of each request
    scratch_start: torch.Tensor
    # [max_num_reqs * num_scratch_rows] int64, 0, 1, 2, ...
    scratch_slots: torch.Tensor
    # by nodes expanded per level, F: [num_levels, max_num_reqs * F] int64, scratch
    # slots that a level writes
    level_slots: dict[int, torch.Tensor]

    verify_active: bool = False
    """Host: the batch being built holds drafts."""

    ragged_query_len: int = 0
    """Host: longest query where the requests of the batch being built share their
    nodes, so that the host's query lengths are only equal shares; otherwise 0."""

    drafting: bool = False
    """Host: a draft level runs, so the MTP layer writes its KV to the scratch cache."""

    level: int = 0
    """Host: which level, 0..S-2; it selects the scratch rows written, and a captured
    graph keeps the level it was captured with."""

    frontier: int = 1
    """Host: nodes that the level expands per request; the same holds."""

    @property
    def shape(self) -> TreeShape:
        """Sizes of every tree."""
        return self.buffers.shape

    def slots_of_level(self, num_rows: int) -> torch.Tensor:
        """Scratch slots ``[<= num_rows]`` int64 of the first rows of this level."""
        return self.level_slots[self.frontier][self.level, :num_rows]


def build_attn_state(
    buffers: TreeBuffers,
    max_num_reqs: int,
    device: torch.device,
    frontiers: Iterable[int] = (),
) -> TreeAttnState:
    """Allocate the buffers that attention needs beside the trees themselves.

    ``frontiers`` are all the F that levels are drafted with; none: the shape's own.
    """
    shape = buffers.shape
    rows = shape.num_scratch_rows
    start = torch.arange(max_num_reqs, dtype=torch.int64, device=device) * rows
    row = torch.arange(rows, dtype=torch.int64, device=device)
    level = torch.arange(shape.num_steps - 1, dtype=torch.int64, device=device)
    return TreeAttnState(
        buffers=buffers,
        prefix_lens=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        scratch_start=start.int(),
        scratch_slots=(start[:, None] + row).flatten(),
        level_slots={
            width: (
                start[None, :, None] + (level[:, None, None] * width + row[:width])
            ).flatten(1)
            for width in {*frontiers} or {shape.frontier}
        },
    )


_state: TreeAttnState | None = None


def get_state() -> TreeAttnState | None:
    """The worker's state; None: trees are off and every backend is upstream's."""
    return _state


def set_state(state: TreeAttnState | None) -> None:
    """Set the worker's state, before vLLM creates the attention metadata builders."""
    global _state
    _state = state
