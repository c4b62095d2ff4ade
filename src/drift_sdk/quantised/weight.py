"""Matrices of weights that remain quantised in memory: what all formats have in common.

A matrix has the rows and columns of the product that it is used for: [out, in]. Each format states its
formula in float32; the result is rounded once, to the dtype that is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch

from drift_sdk.quantised.integers import GroupedIntegers, stack_integers

__all__ = ["Matrix", "QuantisedWeight", "StackedWeight", "dense", "dequantised", "take_rows"]


class QuantisedWeight(ABC):
    """A quantised matrix [out, in], with its tensors on one device."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the weight."""

    @abstractmethod
    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers, [out, in] of `dtype`, computed in float32 and rounded once."""

    def integers(self) -> GroupedIntegers | None:
        """The weight as integers in groups, with the same numbers; None for a format that is none."""
        return None

    @abstractmethod
    def rows(self, index: torch.Tensor) -> QuantisedWeight:
        """The rows of an index [M] of int64, in its order."""

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """The weight on a device; itself if it is there."""

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors())


Matrix = torch.Tensor | QuantisedWeight
"""A matrix [out, in] of numbers, or the same quantised."""


@dataclass(frozen=True, slots=True)
class StackedWeight(QuantisedWeight):
    """The rows of several matrices of different formats, one after the other.

    parts: matrices of equally many columns; those that are tensors are not quantised.
    """

    parts: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        of_parts = [(part,) if isinstance(part, torch.Tensor) else part.tensors() for part in self.parts]
        return tuple(tensor for tensors in of_parts for tensor in tensors)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([dequantised(part, dtype) for part in self.parts])

    def integers(self) -> GroupedIntegers | None:
        parts = [None if isinstance(part, torch.Tensor) else part.integers() for part in self.parts]
        known = [part for part in parts if part is not None]
        return stack_integers(known) if len(known) == len(parts) else None

    def rows(self, index: torch.Tensor) -> QuantisedWeight:
        raise NotImplementedError("rows of stacked weights are not looked up")

    def to(self, device: torch.device) -> StackedWeight:
        return StackedWeight(tuple(part.to(device) for part in self.parts))


def dequantised(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a matrix in `dtype`."""
    return matrix.to(dtype) if isinstance(matrix, torch.Tensor) else matrix.dequantise(dtype)


def take_rows(matrix: Matrix, index: torch.Tensor) -> Matrix:
    """The rows of an index [M] of int64, in its order; of the same format."""
    return matrix[index] if isinstance(matrix, torch.Tensor) else matrix.rows(index)


def dense(matrix: Matrix | tuple[Matrix, ...]) -> torch.Tensor:
    """A matrix, or one of each expert, that is known not to be quantised; TypeError for one that is."""
    if not isinstance(matrix, torch.Tensor):
        raise TypeError(f"a weight of type {type(matrix).__name__}: expected a tensor")

    return matrix
