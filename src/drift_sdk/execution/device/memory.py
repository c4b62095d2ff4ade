"""Memory of a device: what all graphs of an executor share, and what is returned when it is freed."""

from __future__ import annotations

import ctypes
import math
import sys

import torch
from torch import Tensor


class Workspace:
    """Named buffers, each as large as the largest request for it.

    Graphs run one at a time, so a graph may overwrite what another one left in a buffer. The user that needs
    most of a buffer should take it first: a buffer that has to grow is replaced, and the smaller one is kept
    because captured graphs still write to it.

    A name is used in one file only. Buffers that several files use are fields of a struct that is passed on
    (see `forward/rows.py`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # captured graphs still write there
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}  # of the present buffers

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised view of the beginning of a buffer, of this shape and type. Each layer of a step
        takes the same ones."""
        key = name, shape, dtype
        view = self._views.get(key)
        if view is None:
            num_bytes = math.prod(shape) * dtype.itemsize
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() < num_bytes:
                buffer = self._replace(name, num_bytes)
            view = self._views[key] = buffer[:num_bytes].view(dtype).view(shape)
        return view

    def _replace(self, name: str, num_bytes: int) -> Tensor:
        """Make a buffer, or a larger one in its place."""
        if name in self._buffers:
            self._outgrown.append(self._buffers[name])
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
        self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[name]


def return_freed_memory(device: torch.device) -> None:
    """Return the memory that tensors of a device have freed: on a GPU what torch has cached, on a CPU what
    the C library keeps for later allocations (with glibc, which alone can be asked to)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
