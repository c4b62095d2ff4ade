"""Checks of kernel arguments: shapes, types and strides, and numbers on the host.

Values of tensors are never read, since that would wait for the device. Every check raises ValueError with the
argument's name, what was found and what was expected.

Sizes of grids and tiles, computed on the host before each launch.

Triton's functions of these names are made for kernels too: each call from the host takes many times as long,
and a start makes tens of thousands of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor


def cdiv(size: int, part: int) -> int:
    """The number of parts that a size is cut into: the quotient, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is `size` or more, 1 or more; 0 for 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def check_rows(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check shape, type, and that the last dimension is contiguous. Other dimensions may have any stride."""
    if tensor.dtype != dtype or tensor.shape != tuple(shape):
        found = f"{list(tensor.shape)} {tensor.dtype}"
        raise ValueError(f"{name}: {found}: expected {list(shape)} {dtype}")

    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise ValueError(f"{name}: strides {tensor.stride()}: expected 1 along the last dimension")


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check shape, type, and that the whole tensor is contiguous."""
    check_rows(name, tensor, shape, dtype)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}: expected a contiguous tensor")


def check_tensors(shape: Sequence[int], dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """`check_tensor` for several arguments, by name. None is an optional argument that is not given."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, shape, dtype)


class PartialSums(Struct, frozen=True):
    """Layout of the slices of a sum: how many there are, and the elements from one to the next."""

    num_slices: int
    slice_stride: int


def check_partial_sums(
    name: str, tensor: Tensor, num_rows: int, size: int, dtype: torch.dtype
) -> PartialSums:
    """Check a sum in either of two forms, and return how to read it.

    Two dimensions: the sum itself, [num_rows, size] in the storage type `dtype`; one slice. Three dimensions:
    float32 partial sums [num_slices, num_rows, size] with at least one slice, which the kernel adds in
    order. Rows may have any stride.
    """
    if tensor.dim() != 3:
        check_rows(name, tensor, (num_rows, size), dtype)
        return PartialSums(1, 0)

    num_slices = tensor.shape[0]
    check_rows(name, tensor, (max(num_slices, 1), num_rows, size), torch.float32)
    return PartialSums(num_slices, tensor.stride(0))


def check_range(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    """Check that lowest <= value <= highest; without `highest`, there is no upper limit."""
    if value < lowest or (highest is not None and value > highest):
        limit = "or more" if highest is None else f"to {highest}"
        raise ValueError(f"{name}={value}: expected {lowest} {limit}")


def check_power_of_two(name: str, value: int) -> None:
    """Check that a size is 1, 2, 4, 8, ..."""
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name}={value}: expected a power of two")
