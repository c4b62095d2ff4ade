"""Filling a model's memory with the tensors of a source, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from drift_sdk._cuda_driver import ignore_other_captures
from drift_sdk.loading.tensors import InPlaceSource, TensorSource, check_dtype

__all__ = ["fill_place", "fill_places", "read_tensor"]

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
