"""Weights as integers in groups of columns, which other formats are without a change to any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["GroupedIntegers", "stack_integers"]


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
