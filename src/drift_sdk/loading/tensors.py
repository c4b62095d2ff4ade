"""What a decoder's weights are read from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch

from drift_sdk.errors import ModelLoadError

__all__ = ["InPlaceSource", "TensorSource", "check_dtype"]

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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


@runtime_checkable
class InPlaceSource(TensorSource, Protocol):
    """A TensorSource that needs no copy of a tensor to bring it where it belongs."""

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`: contiguous, of the tensor's shape, on any device and of any floating type.

        Raises ModelLoadError for a tensor that is not stored as floating numbers, too.
        """


def check_dtype(tensors: TensorSource, name: str, dtype: torch.dtype) -> None:
    """ModelLoadError naming tensor and file for a type that is no type of weights."""
    if dtype not in STORED_DTYPES:
        raise ModelLoadError(
            f"{tensors.file(name)}: tensor {name} is stored as {dtype}, expected float32, bfloat16 or float16"
        )
