"""Device functions that rank values best first, shared by the tree kernels.

Floats are ranked through integer keys that grow with the value, so "taken" and
"padding" get the one key no value has, and ``-inf`` stays an ordinary value.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from vllm.triton_utils import tl, triton


@triton.jit
def float_to_key(values):
    """Integer key (int32 of float32, int64 of float64) in the order of the values.

    Both zeros share a key. NaN is not allowed.
    """
    values = tl.where(values == 0.0, 0.0, values)
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True)
        keys = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = values.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return keys


@triton.jit
def key_to_float(keys):
    """Inverse of ``float_to_key``."""
    if keys.dtype == tl.int64:
        bits = keys ^ ((keys >> 63) & 0x7FFFFFFFFFFFFFFF)
        values = bits.to(tl.float64, bitcast=True)
    else:
        bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def lowest_key(keys):
    """The key below that of every value, ``-inf`` included: taken, or padding."""
    if keys.dtype == tl.int64:
        low = tl.full([], -0x8000000000000000, tl.int64)
    else:
        low = tl.full([], -0x80000000, tl.int32)
    return low


@triton.jit
def take_best(keys, indices, NONE: tl.constexpr):
    """Take the greatest key, ties lowest index first.

    Returns (its key, its index, the keys without it). When every key is taken or
    padding, the index is ``NONE``.
    """
    low = lowest_key(keys)
    best = tl.max(keys, axis=0)
    found = (keys == best) & (keys != low)
    index = tl.min(tl.where(found, indices, NONE), axis=0)
    return best, index, tl.where(indices == index, low, keys)
