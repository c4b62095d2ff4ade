"""What a decoder's weights are read from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

__all__ = ["TensorSource"]


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, read one at a time.

    Every method but `names` raises KeyError for a name that is not among them, and ModelLoadError for a file
    that cannot be read.
    """

    @property
    def location(self) -> str:
        """The file or folder all of it comes from, for messages."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def file(self, name: str) -> str:
        """The file a tensor comes from."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor as stored, or dequantised to float32."""
