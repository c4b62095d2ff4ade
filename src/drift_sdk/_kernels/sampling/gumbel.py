"""Gumbel noise inside a kernel: what `noise.gumbel_noise` computes, for a run of token ids."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LEAST_NOISE", "MOST_NOISE", "arg_max", "gumbel"]

# -log(-log1p(-u)) at the largest u and at the smallest, rounded outwards.
LEAST_NOISE = tl.constexpr(-2.82)
MOST_NOISE = tl.constexpr(22.88)


LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def arg_max(values, token_ids):
    """(largest of values [N], lowest of token_ids [N] that has it)."""
    best = tl.max(values, axis=0)
    # "Not less" rather than "equal": a model gone wrong, all its logits NaN, must still give a valid id.
    return best, tl.min(tl.where(values < best, LAST_ID, token_ids), axis=0)


@triton.jit
def gumbel(seed, position, first_token, NUM_TOKENS: tl.constexpr):
    """Standard Gumbel variates [NUM_TOKENS] in fp32 for the tokens from `first_token` on.

    `first_token` and NUM_TOKENS are multiples of 4: each counter gives the bits of four tokens.
    """
    groups = (first_token // 4 + tl.arange(0, NUM_TOKENS // 4)).to(tl.uint32)
    zero = groups * 0
    a, b, c, d = tl.philox(seed, groups, zero + position.to(tl.uint32), zero, zero)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    return -tl.log(exponential(tl.minimum(uniform, 1.0 - 2.0**-24)))


@triton.jit
def exponential(uniform):
    """-log1p(-uniform), precise near zero, where the device's logarithm of 1 - uniform is not."""
    # log((1 + s) / (1 - s)) = 2 (s + s^3/3 + s^5/5 + s^7/7 + ...), here with s at most 1/7.
    s = uniform / (2.0 - uniform)
    square = s * s
    series = s * (2.0 + square * (2.0 / 3.0 + square * (2.0 / 5.0 + square * (2.0 / 7.0))))
    return tl.where(uniform < 0.25, series, -tl.log(1.0 - uniform))
