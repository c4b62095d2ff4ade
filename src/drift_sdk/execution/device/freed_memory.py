"""Freed memory, returned to the device or the operating system."""

from __future__ import annotations

import ctypes
import sys

import torch

__all__ = ["return_freed_memory"]


def return_freed_memory(device: torch.device) -> None:
    """Return the memory that tensors of a device have freed: on a GPU what torch has cached, on a CPU what
    the C library keeps for later allocations (with glibc, which alone can be asked to)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
