"""Sources of a decoder's weights, and checks of what they give."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch

from drift_sdk.errors import ModelLoadError

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, read one at a time.

    All methods but `names` raise KeyError for an unknown name, and ModelLoadError for a file that cannot be
    read.
    """

    @property
    def location(self) -> str:
        """The file or folder that holds the tensors, for messages."""

    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def file(self, name: str) -> str:
        """The file that holds a tensor."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor as stored, or dequantised to float32."""


@runtime_checkable
class InPlaceSource(TensorSource, Protocol):
    """A TensorSource that can read a tensor directly into its place."""

    @property
    def num_readers(self) -> int:
        """The most threads that may read tensors at a time."""

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`, a contiguous tensor of the stored shape, on any device and of the stored dtype, of
        any floating-point dtype or uint8.

        Raises ModelLoadError also for a tensor of another dtype that is not stored as floating-point numbers,
        or for a place of uint8, as uint8.
        """


@runtime_checkable
class CheckedSource(TensorSource, Protocol):
    """A TensorSource that finds out from the headers of files what can be read."""

    def check(self, name: str, place: torch.dtype) -> None:
        """Raise ModelLoadError if headers show that a tensor cannot be read into a place of dtype `place`:
        its own, and of a quantised weight those of all its tensors."""


def check_dtype(
    tensors: TensorSource, name: str, dtype: torch.dtype, place: torch.dtype = torch.float32
) -> None:
    """Raise ModelLoadError naming tensor and file if weights stored as `dtype` cannot fill a place of dtype
    `place`: bytes fill bytes, and floating-point numbers those of any type."""
    if place == torch.uint8:
        if dtype != place:
            raise ModelLoadError(f"{tensors.file(name)}: tensor {name} is stored as {dtype}, expected uint8")

    elif dtype not in STORED_DTYPES:
        raise ModelLoadError(
            f"{tensors.file(name)}: tensor {name} is stored as {dtype}, expected float32, bfloat16 or float16"
        )


class FiniteCheck:
    """Finds tensors with NaN or infinity, which a conversion may have produced.

    Each tensor is reduced on its device when it is added; the results are read back once, by `finish`.
    """

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors
        self._names: list[str] = []
        self._extremes: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Check a floating-point tensor, without waiting for the result. All tensors have one device and
        dtype."""
        if tensor.numel() and not tensor.is_meta:
            self._names.append(name)
            # The extremes are NaN if any number is, and no temporary as large as the tensor is allocated.
            self._extremes += torch.aminmax(tensor)

    def finish(self) -> None:
        """Raise ModelLoadError naming the first tensor that is not finite, and its file."""
        if not self._names:
            return

        is_finite = torch.stack(self._extremes).isfinite().view(-1, 2).all(dim=1).tolist()
        bad = [name for name, is_good in zip(self._names, is_finite, strict=True) if not is_good]
        if bad:
            others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            dtype = str(self._extremes[0].dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{self._tensors.file(bad[0])}: tensor {bad[0]} has NaN, infinity or numbers too large for "
                f"{dtype}{others}, expected finite numbers"
            )
