"""Checks of what kernels are called with: of shapes, types and strides alone, never of values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_rows", "check_tensor"]


def check_rows(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """The last dimension must be contiguous; rows may stand apart.

    Raises ValueError naming what was found and expected.
    """
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        found = f"{list(tensor.shape)} {tensor.dtype}"
        raise ValueError(f"{name}: {found}: expected {list(shape)} {dtype}")

    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: strides {tensor.stride()}: expected 1 along the last dimension")


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """The whole tensor must be contiguous. Raises ValueError naming what was found and expected."""
    check_rows(name, tensor, shape, dtype)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}: expected a contiguous tensor")
