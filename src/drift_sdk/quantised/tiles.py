"""Quantised matrices whose columns are in another order than the stored ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from drift_sdk.quantised.integers import GroupedIntegers
from drift_sdk.quantised.weight import QuantisedWeight

__all__ = ["TiledWeight"]


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
