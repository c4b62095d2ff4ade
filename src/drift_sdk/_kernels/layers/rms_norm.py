"""Normalisation by the root mean square, as a part of other kernels.

Two roundings to the storage type: of the normalised value, then of its product with the weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["inverse_rms", "norm_warps", "rms_norm_reference", "weigh"]


@triton.jit
def inverse_rms(sum_of_squares, SIZE: tl.constexpr, eps):
    """What SIZE fp32 values with this sum of squares are multiplied with."""
    return tl.rsqrt(sum_of_squares / SIZE + eps)


@triton.jit
def weigh(normed, weight):
    """fp32 normed times weight, rounded before and after to the weight's type, which is the result's."""
    rounded = normed.to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype)


def norm_warps(size: int) -> int:
    """Warps of a program that normalises a row of `size`: 16 bytes of bfloat16 a thread while they last.

    A function of the size alone: the order of the sum, and so its bits, depend on it.
    """
    return min(max(int(triton.next_power_of_2(size)) // 256, 1), 16)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square, rounded to x's type, times weight [H]."""
    return weight * F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps).to(x.dtype)
