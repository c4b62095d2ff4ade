"""The tensors of a file that together are one quantised weight."""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.tensors import InPlaceSource

__all__ = ["StoredSource", "StoredTensors"]


class StoredSource(InPlaceSource, Protocol):
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
        """The shape of a tensor of two dimensions. Raises ModelLoadError if it has more or fewer."""
        found = self.shape(part)
        if len(found) != 2:
            raise ModelLoadError(f"{self.place(part)} has shape {list(found)}, expected a matrix")

        return found[0], found[1]

    def dtype(self, part: str) -> torch.dtype:
        return self.tensors.dtype(f"{self.prefix}.{part}")

    def read(self, part: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        """A copy of a tensor as stored. Raises ModelLoadError if it is missing, or has another shape or
        dtype."""
        found = self.shape(part)
        if found != shape:
            raise ModelLoadError(f"{self.place(part)} has shape {list(found)}, expected {list(shape)}")

        dtype = self.dtype(part)
        if dtype not in dtypes:
            names = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise ModelLoadError(f"{self.place(part)} is stored as {dtype}, expected {names}")

        # In memory of its own, not through a mapping of the file: see SafetensorsFolder.read_into.
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.tensors.read_into(f"{self.prefix}.{part}", tensor)
        return tensor
