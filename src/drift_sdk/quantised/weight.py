"""Matrices of weights that remain quantised in memory: what all formats have in common.

A matrix has the rows and columns of the product that it is used for: [out, in]. Each format states its
formula in float32; the result is rounded once, to the dtype that is asked for.

Some formats are integers in groups of columns without a change to any number (`GroupedIntegers`). The columns
of a `TiledWeight` are in another order than the stored ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A matrix of integers with a scale, and perhaps an offset, for each group of columns.

    A number is code * scale, or code * scale + offset, in float32 and rounded after each operation.

    codes:    [out, in] int8.
    scales:   [out, groups] float16 or float32; a group has in / groups columns.
    offsets:  of the shape and the dtype of `scales`; None: there are none.
    num_bits: 4 if all codes are -8 to 7, with offsets 0 to 15; else 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    num_bits: int

    @property
    def group_size(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def numbers(self) -> torch.Tensor:
        """The numbers, float32 [out, in]."""
        found = self.codes.to(torch.float32)
        groups = found.view(*self.scales.shape, -1)
        groups.mul_(self.scales[:, :, None].to(torch.float32))
        if self.offsets is not None:
            groups.add_(self.offsets[:, :, None].to(torch.float32))
        return found


def stack_integers(parts: Sequence[GroupedIntegers]) -> GroupedIntegers:
    """The rows of all parts, with groups of the smallest size. The other sizes are its multiples."""
    size = min(part.group_size for part in parts)
    has_offsets = any(part.offsets is not None for part in parts)

    def by_group(part: GroupedIntegers, values: torch.Tensor | None) -> torch.Tensor:
        wide = torch.zeros_like(part.scales) if values is None else values
        return wide.to(torch.float32).repeat_interleave(part.group_size // size, dim=1)

    return GroupedIntegers(
        torch.cat([part.codes for part in parts]),
        torch.cat([by_group(part, part.scales) for part in parts]),
        torch.cat([by_group(part, part.offsets) for part in parts]) if has_offsets else None,
        num_bits=8,
    )


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


@dataclass(frozen=True, slots=True)
class TiledWeight(QuantisedWeight):
    """A matrix whose columns are runs of equally many columns of another one.

    weight:       the other one.
    outer, inner: run j * outer + i is run i * inner + j of it, with i below `outer` and j below `inner`.
    """

    weight: QuantisedWeight
    outer: int
    inner: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.weight.tensors()

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        return self._in_order(self.weight.dequantise(dtype))

    def integers(self) -> GroupedIntegers | None:
        """None also where a group has columns of several runs."""
        found = self.weight.integers()
        width = self.shape[1] // (self.outer * self.inner)
        if found is None or width % found.group_size:
            return None

        return replace(
            found,
            codes=self._in_order(found.codes),
            scales=self._in_order(found.scales),
            offsets=None if found.offsets is None else self._in_order(found.offsets),
        )

    def rows(self, index: torch.Tensor) -> TiledWeight:
        return replace(self, weight=self.weight.rows(index))

    def to(self, device: torch.device) -> TiledWeight:
        return replace(self, weight=self.weight.to(device))

    def _in_order(self, columns: torch.Tensor) -> torch.Tensor:
        """Columns, or something of each group of them, in the order of this matrix."""
        runs: torch.Tensor = columns.unflatten(1, (self.outer, self.inner, -1))
        return runs.transpose(1, 2).flatten(1)
