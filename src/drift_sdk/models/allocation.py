"""Memory for the weights of a model, and the stored tensors that fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from drift_sdk.quantised.stacking import stack_rows
from drift_sdk.quantised.weight import Matrix, QuantisedWeight

__all__ = ["Allocation", "ReadMatrix"]

ReadMatrix = Callable[[str, bool], QuantisedWeight | None]


def _no_matrix(name: str, is_projection: bool) -> None:
    """Reads nothing: all matrices are numbers of the model's dtype."""


class Allocation:
    """Allocates weights that are not initialised.

    places: for each stored tensor the part of the memory that it fills.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, read: ReadMatrix = _no_matrix) -> None:
        """read(name, is_projection): a matrix, if it is to be quantised. It takes no part in `places`."""
        self._device, self._dtype, self._read = device, dtype, read
        self.places: dict[str, torch.Tensor] = {}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory that no stored tensor fills as a whole. dtype: None: the model's."""
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def full(self, value: float, *shape: int) -> torch.Tensor:
        """Weights that files do not have."""
        return torch.full(shape, value, dtype=self._dtype, device=self._device)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.places[name] = self.empty(*shape, dtype=dtype)
        return self.places[name]

    def quantised(self, name: str) -> QuantisedWeight | None:
        """A matrix of a layer, if it is to be quantised."""
        return self._read(name, True)

    def matrix(self, name: str, rows: int, columns: int, *, is_projection: bool = True) -> Matrix:
        """is_projection: of a layer."""
        weight = self._read(name, is_projection)
        return self.tensor(name, rows, columns) if weight is None else weight

    def projection(self, rows: Mapping[str, int], columns: int) -> Matrix:
        """One matrix of the rows of several, by the names of these."""
        if len(rows) == 1:
            return self.matrix(*next(iter(rows.items())), columns)

        weights = {name: self._read(name, True) for name in rows}
        if not any(weights.values()):
            return self.stacked(rows, columns)

        return stack_rows([weights[name] or self.tensor(name, size, columns) for name, size in rows.items()])

    def stacked(self, rows: Mapping[str, int], *columns: int) -> torch.Tensor:
        """One tensor of the rows of several, by the names of these."""
        tensor = self.empty(sum(rows.values()), *columns)
        self.places.update(zip(rows, torch.split(tensor, list(rows.values())), strict=True))
        return tensor
