"""The target sampler's Gumbel noise, for kernels that draft with it.

``add_noise`` repeats the target's arithmetic; ``add_noise_fast`` is a third of the work
and off by about 1e-5, good enough to find where to look closer.
"""

# Kernels are not typed: Triton reads their annotations itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from vllm.triton_utils import tl, tldevice, triton

from vllm_mtp import compat

_uniforms = compat.target_uniforms()
_log1p_neg_stable = _uniforms._log1p_neg_stable
murmur3_hash32 = _uniforms.murmur3_hash32
murmur3_uniform32 = _uniforms.murmur3_uniform32
murmur3_uniform64 = _uniforms.murmur3_uniform64

FAST_MATH = not triton.knobs.runtime.interpret
"""Triton's interpreter has no libdevice."""


@triton.jit
def load_noise_args(
    req, idx_mapping_ptr, temperature_ptr, seeds_ptr, positions_ptr, depth
):
    """(temperature, seed, position) of a batch row; temperature 0 for idle rows."""
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    pos = tl.load(positions_ptr + req).to(tl.int64) + depth
    busy = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=busy, other=0.0).to(tl.float32)
    seed = tl.load(seeds_ptr + slot, mask=busy, other=0)
    return temperature, seed, pos


@triton.jit
def add_noise(values, tokens, temperature, seed, pos, USE_FP64: tl.constexpr):
    """``values / temperature`` plus noise, bit for bit what the target ranks.

    ``_temperature_kernel`` divides in float32 and skips temperature 1, then
    ``gumbel_sample`` adds the noise, in float64 if asked (the result's dtype).
    """
    if temperature != 1.0:
        values = values / temperature
    if USE_FP64:
        u = murmur3_uniform64(seed, pos, tokens)
        values = values.to(tl.float64) - tl.log(-tl.log(u))
    else:
        u = murmur3_uniform32(seed, pos, tokens)
        values = values - tl.log(-_log1p_neg_stable(u))
    return values


@triton.jit
def add_noise_fast(
    values, tokens, temperature, seed, pos, USE_FP64: tl.constexpr, FAST: tl.constexpr
):
    """What ``add_noise`` gives, in float32 and to about 1e-5.

    The noise is ``-log(-log(1 - u))``, where small ``u`` win: there the inner logarithm
    is a series, whose relative error is below 2e-7.
    """
    if USE_FP64:
        # The float64 noise is -log(-log(u)); its winners are near 1.
        u = (1.0 - murmur3_uniform64(seed, pos, tokens)).to(tl.float32)
    else:
        # murmur3_uniform32 without its detour for devices that cannot convert uint32.
        bits = murmur3_hash32(seed, pos, tokens)
        u = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * 0.2))))
    # 2**-24, as upstream: u can round to 1.
    direct = -log_fast(tl.maximum(1.0 - u, 5.960464477539063e-08), FAST)
    exponential = tl.where(u < 0.0625, series, direct)
    return values * (1.0 / temperature) - log_fast(exponential, FAST)


@triton.jit
def exp_fast(values, shift, FAST: tl.constexpr):
    """``exp(values - shift)`` in two instructions, where there are such; 0 for NaN."""
    LOG2E: tl.constexpr = 1.4426950408889634
    scaled = values * LOG2E - shift * LOG2E
    powers = tldevice.exp2(scaled) if FAST else tl.exp2(scaled)
    return tl.maximum(powers, 0.0)


@triton.jit
def log_fast(values, FAST: tl.constexpr):
    """Logarithm by the hardware's instruction alone, where there is one."""
    return tldevice.fast_logf(values) if FAST else tl.log(values)
