"""Reading the matrices of a model that are quantised in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.tensors import FiniteCheck, TensorSource
from drift_sdk.models.filling import fill_place
from drift_sdk.quantised.fp8 import quantise_fp8
from drift_sdk.quantised.int4 import QUANTISED_GROUP, quantise_int4
from drift_sdk.quantised.nvfp4 import NVFP4_GROUP, quantise_nvfp4
from drift_sdk.quantised.weight import QuantisedWeight

__all__ = ["PAIRED", "QUANTISERS", "MatrixReader", "WeightForm", "quantised_bytes"]

WeightForm = Literal["expanded", "stored", "fp8", "int4", "nvfp4"]
"""Form of weights in memory. "expanded": numbers of the model's dtype. "stored": as files store them. "fp8",
"int4", "nvfp4": projections of layers are quantised when they are read, from files that are not quantised."""

QUANTISERS: dict[WeightForm, Callable[[torch.Tensor], QuantisedWeight]] = {
    "fp8": quantise_fp8,
    "int4": quantise_int4,
    "nvfp4": quantise_nvfp4,
}
PAIRED: tuple[WeightForm, ...] = ("int4", "nvfp4")
"""Forms with two columns in a byte: their number has to be even."""


class MatrixReader:
    """Reads matrices quantised, where the form of the weights says so.

    finite: collects the numbers that were read, in the model's dtype.

    Raises ModelLoadError naming tensor and file.
    """

    def __init__(
        self,
        tensors: TensorSource,
        form: WeightForm,
        *,
        device: torch.device,
        dtype: torch.dtype,
        on_read: Callable[[], None],
    ) -> None:
        self.finite: FiniteCheck = FiniteCheck(tensors)
        self._tensors = tensors
        self._quantised: QuantisedSource | None = None
        if form == "stored" and isinstance(tensors, QuantisedSource):  # asked once: the check takes long
            self._quantised = tensors
        self._form = form
        self._device = device
        self._dtype = dtype
        self._on_read = on_read

    def read(self, name: str, is_projection: bool) -> QuantisedWeight | None:
        """A matrix; None if it is to be numbers of the model's dtype. is_projection: of a layer, and so
        quantised by the QUANTISERS."""
        weight: QuantisedWeight | None = None
        if self._quantised is not None:
            weight = self._quantised.quantised(name, self._device)
        elif self._form in QUANTISERS and is_projection:
            weight = self._quantise(name)

        if weight is not None:
            self.finite.add(name, weight.dequantise(self._dtype))
            self._on_read()
        return weight

    def _quantise(self, name: str) -> QuantisedWeight:
        matrix = torch.empty(self._tensors.shape(name), dtype=torch.float32, device=self._device)
        fill_place(matrix, self._tensors, name)
        return QUANTISERS[self._form](matrix)


def quantised_bytes(rows: int, columns: int, form: WeightForm) -> int:
    """Bytes of a matrix that is quantised when it is read. form: a key of QUANTISERS."""
    if form == "fp8":
        return rows * columns + 4 * rows

    if form == "nvfp4":
        return rows * (columns // 2 + -(-columns // NVFP4_GROUP) + 4)

    return rows * columns // 2 + 2 * rows * -(-columns // QUANTISED_GROUP)
