"""Normalisation by the root mean square (RMS norm), as a part of other kernels.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * weight

Kinds of norms differ in the product with the weight:

- rounded: the normalised value is rounded to the storage type, and its product with the weight again
- wide: the product with the weight is float32, and rounded once
- offset: as wide, with 1 + weight in place of the weight (Gemma)

The sum of squares is float32, in an order that depends on the size and on the number of warps (see
`norm_warps`).
"""

from __future__ import annotations

from typing import Literal

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.sizes import next_power_of_2

__all__ = ["NormKind", "inverse_rms", "norm_warps", "weigh"]

NormKind = Literal["rounded", "wide", "offset"]


@device_function
def inverse_rms(
    sum_of_squares,  # fp32
    SIZE: tl.constexpr,  # of how many values
    eps,
):
    """Return 1 / sqrt(sum_of_squares / SIZE + eps), the factor that normalises the values."""
    return tl.rsqrt(sum_of_squares / SIZE + eps)


@device_function
def weigh(
    normed,  # fp32, any shape
    weight,  # storage type, the same shape
    NORM_KIND: tl.constexpr = tl.constexpr("rounded"),  # noqa: B008 - older Triton takes no other default
):
    """Return normed times weight in the storage type, as the kind of norm says."""
    if NORM_KIND == "offset":
        return (normed * (1.0 + weight.to(tl.float32))).to(weight.dtype)
    elif NORM_KIND == "wide":
        return (normed * weight.to(tl.float32)).to(weight.dtype)
    else:
        rounded = normed.to(weight.dtype).to(tl.float32)
        return (rounded * weight.to(tl.float32)).to(weight.dtype)


def norm_warps(size: int) -> int:
    """Return the warps of a program that normalises a row of `size` values: 1 to 16, a power of two.

    256 values a warp are 8 for each of its 32 threads, 16 bytes of bfloat16: the widest load. 16 warps, which
    are reached at 4,096 values, are half of the 32 that a CTA may have. The result depends on the size alone,
    since the order of the sum of squares, and so its bits, depend on the number of warps.
    """
    return min(max(next_power_of_2(size) // 256, 1), 16)
