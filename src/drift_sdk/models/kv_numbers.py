"""Numbers of a KV cache as they are stored: of the model's dtype, e4m3, or NVFP4.

In NVFP4, a head of a token is a row of bytes: its codes, two in a byte, then the e4m3 scales of its groups of
16 dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from drift_sdk.quantised.fp8 import E4M3, quantise_e4m3
from drift_sdk.quantised.nvfp4 import NVFP4_GROUP, nvfp4_numbers, quantise_groups

__all__ = ["KVForm", "bytes_of_head", "decode", "encode", "stored_shape"]

KVForm = Literal["fp8", "nvfp4"]


def stored_shape(head_dim: int, dtype: torch.dtype, form: KVForm | None) -> tuple[torch.dtype, int]:
    """The dtype of what is stored, and the number of elements of a head. form: None: numbers of `dtype`."""
    if form == "nvfp4":
        return torch.uint8, head_dim // 2 + -(-head_dim // NVFP4_GROUP)

    return dtype if form is None else E4M3, head_dim


def bytes_of_head(head_dim: int, dtype: torch.dtype, form: KVForm | None) -> int:
    """Bytes of a head of a token's keys, or of its values."""
    stored, size = stored_shape(head_dim, dtype, form)
    return stored.itemsize * size


def encode(x: Tensor, scale: Tensor, form: KVForm) -> Tensor:
    """Return the stored form of numbers [..., head_dim], as uint8. scale: float32, of a shape that
    broadcasts."""
    if form == "fp8":
        return quantise_e4m3(x, scale).view(torch.uint8)

    codes, scales = quantise_groups(x, scale)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def decode(stored: Tensor, scale: Tensor, form: KVForm, head_dim: int) -> Tensor:
    """Return the numbers [..., head_dim] of their stored form, as float32."""
    if form == "fp8":
        return stored.to(torch.float32) * scale

    codes, scales = stored.split((head_dim // 2, stored.shape[-1] - head_dim // 2), dim=-1)
    return nvfp4_numbers(codes, scales.contiguous().view(E4M3).to(torch.float32) * scale)
