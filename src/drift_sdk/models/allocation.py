"""Memory for the weights of a model, and filling it with stored tensors, several at a time.

`MatrixReader` reads matrices that are quantised in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

import torch

from drift_sdk._cuda_driver import ignore_other_captures
from drift_sdk.errors import ModelLoadError, is_out_of_memory
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.tensors import FiniteCheck, InPlaceSource, TensorSource, check_dtype
from drift_sdk.quantised.formats import (
    NVFP4_GROUP,
    QUANTISED_GROUP,
    quantise_fp8,
    quantise_int4,
    quantise_nvfp4,
    stack_rows,
)
from drift_sdk.quantised.weight import Matrix, QuantisedWeight

ReadMatrix = Callable[[str, bool], QuantisedWeight | None]


def no_matrix(name: str, is_projection: bool) -> None:
    """Reads nothing: all matrices are numbers of the model's dtype."""


class Allocation:
    """Allocates weights that are not initialised.

    places: for each stored tensor the part of the memory that it fills.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, read: ReadMatrix = no_matrix) -> None:
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

    @property
    def has_reordered(self) -> bool:
        """Whether `finish` puts rows of any tensor in another order."""
        return bool(self._reordered)

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


@contextmanager
def memory_named(location: str, device: torch.device, num_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn the errors of too little memory into a ModelLoadError that names files, device and amount."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise

        size = f"{num_bytes() / 2**30:.1f} GiB"
        raise ModelLoadError(
            f"{location}: not enough memory on {device} for {size} of weights: {error}"
        ) from error


AHEAD = 2
"""Tensors that are read or wait for it, for each thread: the end of a process waits for these."""


def fill_places(
    places: Mapping[str, torch.Tensor], tensors: TensorSource
) -> Iterator[tuple[str, torch.Tensor]]:
    """Fill each place with the tensor of its name, and yield both when that is done, in order.

    Tensors are read on threads where the source permits it. Raises ModelLoadError as the source does, for the
    first tensor in order that cannot be read. If the caller stops, nothing that has not begun is read.
    """
    in_place = tensors if isinstance(tensors, InPlaceSource) else None
    num_readers = 1 if in_place is None else in_place.num_readers
    if num_readers == 1 or not places:
        for name, place in places.items():
            _fill(place, tensors, in_place, name)
            yield name, place
        return

    device = next(iter(places.values())).device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    waiting: deque[tuple[str, torch.Tensor, Future[None]]] = deque()
    prepare = None if stream is None else ignore_other_captures
    readers = ThreadPoolExecutor(num_readers, "drift-load", prepare)
    try:
        for name, place in places.items():
            waiting.append((name, place, readers.submit(_fill_in, stream, place, tensors, in_place, name)))
            if len(waiting) == AHEAD * num_readers:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:
        readers.shutdown(cancel_futures=True)


def read_tensor(tensors: TensorSource, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor for a place of `dtype`: numbers for numbers, bytes for bytes. Raises ModelLoadError for one of
    another kind."""
    tensor = tensors.get(name)
    check_dtype(tensors, name, tensor.dtype, dtype)
    return tensor


def _first(waiting: deque[tuple[str, torch.Tensor, Future[None]]]) -> tuple[str, torch.Tensor]:
    name, place, future = waiting.popleft()
    future.result()
    return name, place


@torch.inference_mode()
def _fill_in(
    stream: torch.cuda.Stream | None,
    place: torch.Tensor,
    tensors: TensorSource,
    in_place: InPlaceSource | None,
    name: str,
) -> None:
    """Fill a place in the caller's stream, after what used its memory before."""
    with torch.cuda.stream(stream):
        _fill(place, tensors, in_place, name)


def fill_place(place: torch.Tensor, tensors: TensorSource, name: str) -> None:
    """Fill a place. Raises ModelLoadError as the source does, and for a tensor of another kind."""
    _fill(place, tensors, tensors if isinstance(tensors, InPlaceSource) else None, name)


def _fill(place: torch.Tensor, tensors: TensorSource, in_place: InPlaceSource | None, name: str) -> None:
    """in_place: the source, if it is one; asked once, because the check takes long."""
    if in_place is not None and place.is_contiguous():
        in_place.read_into(name, place)
    else:
        place.copy_(read_tensor(tensors, name, place.dtype))


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
