"""Gumbel noise inside a kernel, and the arg max that samples with it.

The kernels' counterpart of `torch_reference.gumbel_noise`, which is the reference: the same Philox words, so
the same uniforms bit for bit; logarithms differ from torch's by rounding.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.launch.kernel import device_function

LEAST_NOISE = tl.constexpr(-2.82)
"""-log(-log1p(-u)) = -2.81... at the largest uniform u = 1 - 2**-24, rounded down."""
MOST_NOISE = tl.constexpr(22.88)
"""-log(-log1p(-u)) = 22.87... at the smallest uniform u = 2**-33, rounded up."""
LAST_ID = tl.constexpr(2**31 - 1)
"""Larger than every token id: the id of no token, which loses every tie."""


@device_function
def arg_max(values, token_ids):
    """(largest of values [N], lowest of token_ids [N] that has it)."""
    best = tl.max(values, axis=0)
    # "Not less" rather than "equal": logits that are all NaN must still give a valid id.
    return best, tl.min(tl.where(values < best, LAST_ID, token_ids), axis=0)


@device_function
def gumbel(seed, position, first_token, NUM_TOKENS: tl.constexpr):
    """Standard Gumbel variates [NUM_TOKENS] in fp32 for the tokens from `first_token` on.

    `first_token` and NUM_TOKENS are multiples of 4: each Philox counter gives the bits of four tokens.
    """
    counters = (first_token // 4 + tl.arange(0, NUM_TOKENS // 4)).to(tl.uint32)
    zero = counters * 0
    a, b, c, d = tl.philox(seed, counters, zero + position.to(tl.uint32), zero, zero)
    return gumbel_from_bits(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@device_function
def gumbel_from_bits(bits):
    """Standard Gumbel variates in fp32 from 32 random bits each.

    The uniform is (bits + 1/2) / 2**32, in (0, 1): rounded to fp32, and at most the last number before 1.
    """
    uniform = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    return -tl.log(exponential(tl.minimum(uniform, 1.0 - 2.0**-24)))


@device_function
def exponential(uniform):
    """-log1p(-uniform), precise near zero, where the device's logarithm of 1 - uniform is not."""
    # log((1 + s) / (1 - s)) = 2 (s + s^3/3 + s^5/5 + s^7/7 + ...), here with s at most 1/7: used below 1/4,
    # where the first term left out, 2 s^9/9, is under 2**-24 of the sum.
    s = uniform / (2.0 - uniform)
    square = s * s
    series = s * (2.0 + square * (2.0 / 3.0 + square * (2.0 / 5.0 + square * (2.0 / 7.0))))
    return tl.where(uniform < 0.25, series, -tl.log(1.0 - uniform))
