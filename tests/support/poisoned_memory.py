"""Memory of NaN, for large tensors that are made without values."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from functools import cache

import torch

__all__ = ["can_map", "map_nan"]

DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64}
"""Types in which a number whose bits are all 1 is NaN."""
MIN_BYTES = 2**20
"""Smaller tensors are filled as fast."""
MAX_BYTES = 2**28
"""Larger tensors are filled, so that the file stays small."""


def can_map(tensor: torch.Tensor) -> bool:
    """Whether a tensor without values can be replaced by one of `map_nan`."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_plain and tensor.dtype in DTYPES and MIN_BYTES <= tensor.nbytes <= MAX_BYTES


def map_nan(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN on the CPU. Only pages that are written take memory and time, which are few of a KV
    cache that a test hardly uses."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    file = _file()
    missing = num_bytes - os.fstat(file).st_size
    if missing > 0:
        os.pwrite(file, b"\xff" * missing, num_bytes - missing)
    pages = mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


@cache
def _file() -> int:
    """A file whose bits are all 1, as long as the longest tensor so far."""
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
