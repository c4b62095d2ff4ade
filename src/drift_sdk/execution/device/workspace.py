"""Memory that all graphs of an executor share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Named buffers, as large as the largest of their takers: graphs run one at a time, so what one leaves in
    a buffer the next may overwrite. Whoever needs most should take first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # captured graphs still write there

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised view of a buffer's beginning."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._buffers[name] = buffer

        return buffer[:num_bytes].view(dtype).view(shape)
