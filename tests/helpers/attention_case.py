"""A batch of trees over a poisoned paged MLA cache, for attention tests.

Caches are NaN wherever no token lies and block tables hold absurd numbers past the
last block, so reading or skipping too much shows.
"""

import numpy as np
import torch

from tests.helpers.trees import DEVICE, to_signed
from vllm_mtp.kernels.paged_tree_attention import paged_tree_attention
from vllm_mtp.kernels.tree_attention import tree_suffix_attention
from vllm_mtp.reference import tree_attention as plain

ON_GPU = DEVICE == "cuda"
LATENT, ROPE = (512, 64) if ON_GPU else (64, 16)
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.bfloat16]

TOLERANCE = {
    # Sums of a few hundred float32 products in another order.
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    # The weights, the merged prefix and the result are rounded to 11 bits each.
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    # The same to 8 bits each, of values up to about 4.
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
}

PADDED = None
"""A request without rows, as graphs pad batches."""


def randn(*shape, dtype=torch.float32):
    """Standard normal numbers on DEVICE."""
    return torch.randn(*shape).to(dtype).to(DEVICE)


class AttentionCase:
    """One batch over a paged MLA cache, suffix rows at their slots in the cache."""

    def __init__(
        self, trees, prefixes, dtype, *, heads=4, page=16, pad_blocks=0, seed=0
    ):
        torch.manual_seed(seed)
        rows = [0 if tree is PADDED else len(tree.parents) for tree in trees]
        self.dtype, self.page, self.heads = dtype, page, heads
        self.scale = (LATENT + ROPE) ** -0.5
        self.max_rows = max(rows)
        self.starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
        self.prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
        masks = [to_signed(bits) for tree in trees if tree for bits in tree.masks]
        self.masks = torch.tensor(masks, dtype=torch.int64)
        self.query = randn(int(self.starts[-1]), heads, LATENT + ROPE, dtype=dtype)

        lengths = [p + n for p, n in zip(prefixes, rows, strict=True)]
        blocks = [-(-length // page) for length in lengths]
        order = torch.randperm(sum(blocks) + 3)
        # Extra width makes the block stride larger than a block, as in hybrid caches.
        storage = torch.full(
            (len(order), page + pad_blocks, LATENT + ROPE), float("nan")
        )
        self.block_table = torch.full(
            (len(trees), max(blocks) + 2), 2**30, dtype=torch.int32
        )
        slots, used = [], 0
        for r, length in enumerate(lengths):
            ids = order[used : used + blocks[r]]
            used += blocks[r]
            self.block_table[r, : blocks[r]] = ids.int()
            for t in range(length):
                storage[ids[t // page], t % page] = torch.randn(LATENT + ROPE)
                if t >= prefixes[r]:
                    slots.append(int(ids[t // page]) * page + t % page)
        self.cache = storage.to(dtype).to(DEVICE)[:, :page]
        self.slots = torch.tensor(slots, dtype=torch.int64)
        for name in ("starts", "prefix_lens", "masks", "block_table", "slots"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    @property
    def split_query(self):
        """Latent part contiguous, RoPE part a strided view, as vLLM hands them."""
        return self.query[..., :LATENT].contiguous(), self.query[..., LATENT:]

    def prefix(self):
        """Output in the case's dtype and float32 log-sum-exp, from the twin."""
        out, lse = plain.paged_prefix_attention(
            self.query.float().cpu(),
            self.cache.float().cpu(),
            self.block_table.cpu(),
            self.prefix_lens.cpu(),
            self.starts.cpu(),
            LATENT,
            self.scale,
        )
        return out.to(self.dtype).to(DEVICE), lse.to(DEVICE)

    def expected(self, masks=None, slots=None, cache=None):
        """The twin's answer in float32, on the host."""
        out, lse = self.prefix()
        cache = self.cache if cache is None else cache
        keys = cache.float().cpu().flatten(0, 1).unsqueeze(1)
        return plain.tree_suffix_attention(
            self.query.float().cpu(),
            keys,
            keys[..., :LATENT],
            self.starts.cpu(),
            (self.masks if masks is None else masks).cpu(),
            self.starts[:-1].cpu(),
            (self.slots if slots is None else slots).cpu(),
            64,
            out.float().cpu(),
            lse.cpu(),
            self.scale,
        )

    def suffix(
        self, prefix_out, prefix_lse, masks="own", slots=None, cache=None, **kwargs
    ):
        """The suffix kernel over a given prefix."""
        cache = self.cache if cache is None else cache
        return tree_suffix_attention(
            kwargs.pop("query", self.split_query),
            cache,
            cache[..., :LATENT],
            self.starts,
            self.masks if isinstance(masks, str) else masks,
            self.starts[:-1],
            self.slots if slots is None else slots,
            self.max_rows,
            prefix_out,
            prefix_lse,
            self.scale,
            max_query_len=self.max_rows,
            **kwargs,
        )

    def paged(self, masks="own", **kwargs):
        """The one-pass kernel."""
        return paged_tree_attention(
            self.split_query,
            self.cache,
            self.block_table,
            self.prefix_lens,
            self.starts,
            self.masks if isinstance(masks, str) else masks,
            self.starts[:-1],
            self.slots,
            self.max_rows,
            self.scale,
            max_query_len=self.max_rows,
            max_prefix_len=int(self.prefix_lens.max()),
            **kwargs,
        )

    def check(self, found, expected=None):
        """Within the tolerance of the case's dtype."""
        expected = self.expected() if expected is None else expected
        torch.testing.assert_close(
            found.float().cpu(), expected, **TOLERANCE[self.dtype]
        )
