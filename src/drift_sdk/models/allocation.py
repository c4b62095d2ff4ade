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
        self._reordered: list[tuple[torch.Tensor, torch.Tensor]] = []
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

    def projection(self, rows: Mapping[str, int], columns: int, order: torch.Tensor | None = None) -> Matrix:
        """One matrix of the rows of several, by the names of these.

        order [rows] int64, on the CPU: the rows of files that are the rows of the matrix; None: as in files.
        """
        weights = {name: self._read(name, True) for name in rows}
        if not any(weights.values()):
            return self.in_order(self.stacked(rows, columns), order)

        parts: list[Matrix] = [
            weights[name] or self.tensor(name, size, columns) for name, size in rows.items()
        ]
        return _stack(parts if order is None else self._pieces(parts, order))

    def _pieces(self, parts: list[Matrix], order: torch.Tensor) -> list[Matrix]:
        """Runs of rows of the parts, which are the rows of all parts in an order. Those of tensors, which are
        not filled yet, are parts of these."""
        sizes = torch.tensor([part.shape[0] for part in parts], dtype=torch.int64, device="cpu")
        ends = sizes.cumsum(0)
        owners = torch.bucketize(order, ends, right=True)
        ordered: list[Matrix] = []
        for index, (part, first) in enumerate(zip(parts, (ends - sizes).tolist(), strict=True)):
            own = order[owners == index] - first
            if isinstance(part, torch.Tensor):
                ordered.append(self.in_order(part, own))
            else:
                ordered.append(part.rows(own))

        pieces: list[Matrix] = []
        taken = [0] * len(parts)
        runs = owners.unique_consecutive(return_counts=True)
        for index, size in zip(*(each.tolist() for each in runs), strict=True):
            whole, first = ordered[index], taken[index]
            taken[index] += size
            if isinstance(whole, torch.Tensor):
                pieces.append(whole[first : first + size])
            else:
                pieces.append(whole.rows(torch.arange(first, first + size, device="cpu")))
        return pieces

    def in_order(self, tensor: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """The tensor, whose rows `finish` puts in another order than files have them."""
        if order is not None:
            self._reordered.append((tensor, order))
        return tensor

    def finish(self) -> None:
        """Put rows in order, once all places are filled."""
        for tensor, order in self._reordered:
            tensor.copy_(tensor[order.to(tensor.device)])

    def stacked(self, rows: Mapping[str, int], *columns: int) -> torch.Tensor:
        """One tensor of the rows of several, by the names of these."""
        tensor = self.empty(sum(rows.values()), *columns)
        self.places.update(zip(rows, torch.split(tensor, list(rows.values())), strict=True))
        return tensor


def _stack(parts: list[Matrix]) -> Matrix:
    return parts[0] if len(parts) == 1 else stack_rows(parts)
