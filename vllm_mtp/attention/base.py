"""What every tree-aware MLA backend shares: metadata, builder and impl mixins.

For tree rows attention is **prefix** (all tokens before the root, unmasked, the
backend's own kernel, with log-sum-exp) plus **suffix** (the tree's own rows under
their ancestor bits) merged by log-sum-exp. Rows without a tree carry causal bits, so a
verify pass has one code path; prefill rows and layers stay upstream's.

Two kinds of passes use it:

* *verify*: the target's layers, suffix rows in the paged cache at the slots the rows
  were just written to;
* *draft level*: the MTP layer, suffix rows in a scratch cache of the same layout.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TreeAttnMetadata:
    """Added to ``attn_metadata.decode`` as ``tree`` when the pass holds tree rows.

    Every tensor is a view of a persistent buffer, so a captured graph can replay it.
    """

    # [num_reqs] int32, tokens before each request's first row; 0 for padded requests
    prefix_lens: torch.Tensor
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor
    # [num_rows] int64, ancestor bits of each row
    row_masks: torch.Tensor
    # [num_reqs] int32, start of each request in suffix_slots
    suffix_start: torch.Tensor
    # [*] int64, physical slots of suffix rows
    suffix_slots: torch.Tensor
    # suffix rows looked at: 1 + N when verifying, scratch rows when drafting
    max_suffix: int
    # longest query of the pass in rows (host); 1 + N or k in graphs
    max_query_len: int
    # upper bound of prefix_lens (host); the model length in graphs
    max_prefix_len: int
    # None: the suffix lies in the layer's paged cache; else the scratch cache,
    # [num_scratch_blocks, block_size, head_size], same dtype and inner layout
    scratch: torch.Tensor | None = None
    # filled by backends that schedule ahead of time (FlashAttention 3)
    schedule: Any = None
