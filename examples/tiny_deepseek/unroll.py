"""Attention of draft chains that start at many positions of a sequence at once.

A chain with origin P (the last position with a true hidden state) sees the MTP layer's
true rows 0..P and its own rows at the depths before. With rows indexed by origin, that
is a causal mask over the keys of depth 0 and a diagonal over those of deeper depths.
"""

from functools import lru_cache

import torch
from model import attend_causally
from torch import Tensor, nn


@lru_cache(maxsize=64)
def build_mask(
    num_keys: int, first: int, rows: int, depth: int, device: torch.device
) -> Tensor:
    """Returns [rows, num_keys + depth * rows], True where a row may look.

    Args:
        num_keys: Number of true rows.
        first: Origin of the first row.
        rows: Number of origins.
        depth: Number of depths behind the true rows, this one included.
        device: Where to put the mask.
    """
    origins = torch.arange(first, first + rows, device=device)
    true_rows = torch.arange(num_keys, device=device) <= origins[:, None]
    own_rows = torch.eye(rows, dtype=torch.bool, device=device)
    return torch.cat([true_rows, *[own_rows] * depth], dim=1)


class UnrolledAttend:
    """Attention of the MTP layer; to be called once for a depth.

    Depth 0 holds all origins, the deeper ones a range of them.

    Args:
        first: First origin of the deeper depths.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends to all earlier depths and this one."""
        self.keys.append(k)
        self.values.append(v)
        depth, rows = len(self.keys) - 1, q.shape[2]
        if depth == 0:
            return attend_causally(q, k, v)
        num_keys = self.keys[0].shape[2]
        mask = build_mask(num_keys, self.first, rows, depth, q.device)
        k, v = torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
