"""Rounding to e4m3: eight-bit numbers with a sign, four bits of exponent and three of mantissa."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["E4M3", "MAX_E4M3", "quantise_e4m3"]

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
"""The largest number of e4m3; the smallest is 2**-9."""


def quantise_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Return the e4m3 numbers next to x / scale, of equally near ones the even one.

    Numbers beyond MAX_E4M3 become MAX_E4M3, and NaN zero. scale: float32, of a shape that broadcasts to that
    of x.
    """
    quotient = x.to(torch.float32) / scale
    return quotient.nan_to_num(nan=0.0).clamp_(-MAX_E4M3, MAX_E4M3).to(E4M3)
