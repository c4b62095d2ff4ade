"""Numbers of MXFP4 in registers: codes of 4 bits and block scales to the storage type, exactly.

A code c stands for 0, 0.5, 1, 1.5, 2, 3, 4 or 6 (bits 0 to 2), negative if bit 3 is set, and a scale s for
2 ** (s - 127), with s from 0 to 252. Two bits of exponent and one of mantissa, put at the place that they
have in bfloat16, are the number times 2 ** -126; two products with powers of two, both exact, do the rest.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function

__all__ = ["BLOCK_BYTES", "BLOCK_SIZE", "dequantise_codes", "scale_factors"]

BLOCK_SIZE = tl.constexpr(32)
"""Numbers that share a scale."""

BLOCK_BYTES = tl.constexpr(16)

CODE_FACTOR = tl.constexpr(2.0**126)


@device_function
def dequantise_codes(
    codes,  # integers 0 to 15
    factors,  # of the same shape, storage type: those of `scale_factors`
):
    """Return the numbers, in the storage type: float32 or bfloat16."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 6)
    return _from_bits(bits, factors.dtype) * CODE_FACTOR * factors


@device_function
def scale_factors(
    scales,  # uint8, at most 252
    DTYPE: tl.constexpr,  # the storage type
):
    """Return 2 ** (scale - 127) in the storage type. Scale 0 is a subnormal number."""
    wide = scales.to(tl.int32)
    return _from_bits(tl.where(wide == 0, 64, wide << 7), DTYPE)


@device_function
def _from_bits(bits, DTYPE: tl.constexpr):
    """Return the numbers whose bits in bfloat16 are the low 16 of integers, in the storage type."""
    if DTYPE == tl.float32:
        numbers = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        numbers = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return numbers
