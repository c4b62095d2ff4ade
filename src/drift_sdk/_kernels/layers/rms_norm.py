"""Normalisation by the root mean square (RMS norm), as a part of other kernels.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * weight

Two roundings to the storage type: of the normalised value, then of its product with the weight. Offset norms
(Gemma's) multiply by 1 + weight in float32, and round once. The sum of
squares is float32, in an order that depends on the size and on the number of warps (see `norm_warps`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["inverse_rms", "norm_warps", "rms_norm_reference", "weigh"]


@triton.jit
def inverse_rms(
    sum_of_squares,  # fp32
    SIZE: tl.constexpr,  # of how many values
    eps,
):
    """Return 1 / sqrt(sum_of_squares / SIZE + eps), the factor that normalises the values."""
    return tl.rsqrt(sum_of_squares / SIZE + eps)


@triton.jit
def weigh(
    normed,  # fp32, any shape
    weight,  # storage type, the same shape
    IS_OFFSET: tl.constexpr = False,
):
    """Return normed times weight in the storage type, rounded to it before and after the product; with
    IS_OFFSET, normed times 1 + weight, rounded once."""
    if IS_OFFSET:
        return (normed * (1.0 + weight.to(tl.float32))).to(weight.dtype)

    rounded = normed.to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype)


def norm_warps(size: int) -> int:
    """Return the warps of a program that normalises a row of `size` values: 1 to 16, a power of two.

    256 values a warp are 8 for each of its 32 threads, 16 bytes of bfloat16: the widest load. 16 warps, which
    are reached at 4,096 values, are half of the 32 that a CTA may have. The result depends on the size alone,
    since the order of the sum of squares, and so its bits, depend on the number of warps.
    """
    return min(max(int(triton.next_power_of_2(size)) // 256, 1), 16)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False) -> Tensor:
    """Return x [..., H] over its root mean square, rounded to x's type, times weight [H]; with is_offset,
    times 1 + weight before it is rounded."""
    normed = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    if is_offset:
        return (normed * (1.0 + weight.to(torch.float32))).to(x.dtype)

    return weight * normed.to(x.dtype)
