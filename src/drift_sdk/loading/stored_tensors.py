"""The tensors of a file that together are one quantised weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.tensors import CheckedSource, InPlaceSource

__all__ = ["Shape", "StoredSource", "StoredTensors"]

Shape = tuple[int, int]
"""Rows and columns of a weight."""


class StoredSource(CheckedSource, InPlaceSource, Protocol):
    """An InPlaceSource that knows how tensors are stored."""

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor."""


class StoredTensors(Struct, frozen=True):
    """Tensors whose names begin with a module's: a weight's codes, scales and zero points.

    prefix: the name of the module.
    device: where tensors are read to.

    All methods take the last part of a name. Errors name tensor and file.
    """

    tensors: StoredSource
    prefix: str
    device: torch.device

    def has(self, part: str) -> bool:
        return f"{self.prefix}.{part}" in self.tensors.names()

    def place(self, part: str) -> str:
        """File and name of a tensor, for messages."""
        name = f"{self.prefix}.{part}"
        return f"{self.tensors.file(name)}: tensor {name}"

    def shape(self, part: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ModelLoadError if it is missing."""
        if not self.has(part):
            raise ModelLoadError(f"{self.tensors.location}: tensor {self.prefix}.{part} is missing")

        return self.tensors.shape(f"{self.prefix}.{part}")

    def matrix_shape(self, part: str) -> tuple[int, int]:
        """The shape of a tensor of two dimensions. Raises ModelLoadError for more, fewer or empty ones."""
        found = self.shape(part)
        if len(found) != 2 or 0 in found:
            raise ModelLoadError(f"{self.place(part)} has shape {list(found)}, expected a matrix")

        return found[0], found[1]

    def dtype(self, part: str) -> torch.dtype:
        return self.tensors.dtype(f"{self.prefix}.{part}")

    def check(
        self, part: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
    ) -> tuple[int, ...]:
        """The shape of a tensor. Raises ModelLoadError if it is missing, or has none of these shapes or
        dtypes."""
        found = self.shape(part)
        if found not in shapes:
            expected = " or ".join(str(list(each)) for each in dict.fromkeys(shapes))
            raise ModelLoadError(f"{self.place(part)} has shape {list(found)}, expected {expected}")

        dtype = self.dtype(part)
        if dtype not in dtypes:
            names = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise ModelLoadError(f"{self.place(part)} is stored as {dtype}, expected {names}")

        return found

    def read(self, part: str) -> torch.Tensor:
        """A copy of a tensor as stored."""
        # In memory of its own, not through a mapping of the file: see SafetensorsFolder.read_into.
        tensor = torch.empty(self.shape(part), dtype=self.dtype(part), device=self.device)
        self.tensors.read_into(f"{self.prefix}.{part}", tensor)
        return tensor

    def read_finite(self, part: str) -> torch.Tensor:
        """A copy of a tensor of floating-point numbers. Raises ModelLoadError for NaN and infinity."""
        tensor = self.read(part)
        if not tensor.to(torch.float32).isfinite().all():
            raise ModelLoadError(f"{self.place(part)} has NaN or infinity, expected finite numbers")

        return tensor
