"""Filling a model's memory from a source whose tensors are read on threads."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest
import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.models.allocation import AHEAD, fill_places

NAMES = tuple(f"tensor {index}" for index in range(40))


class CountedSource:
    """A source whose reads wait for one another, until `num_readers` of them are in work at a time."""

    location = "memory"

    def __init__(self, num_readers: int, *, broken: str | None = None) -> None:
        self.num_readers = num_readers
        self.read: list[str] = []
        self._broken = broken
        self._all_read = threading.Barrier(num_readers)

    def names(self) -> Collection[str]:
        return NAMES

    def shape(self, name: str) -> tuple[int, ...]:
        return (3,)

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> torch.Tensor:
        raise AssertionError("tensors are read in place")

    def read_into(self, name: str, place: torch.Tensor) -> None:
        self.read.append(name)
        if self._broken is None:
            self._all_read.wait(timeout=60)
        if name == self._broken:
            raise ModelLoadError(f"{name} cannot be read")

        place.fill_(NAMES.index(name))


def places() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {name: torch.full((3,), torch.nan, device="cpu") for name in NAMES}


@pytest.mark.parametrize("num_readers", [1, 4])
def test_all_places_are_filled_and_yielded_in_order(num_readers: int) -> None:
    source, empty = CountedSource(num_readers), places()
    with torch.inference_mode():
        found = [(name, place.tolist()) for name, place in fill_places(empty, source)]
    assert found == [(name, [float(index)] * 3) for index, name in enumerate(NAMES)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drift-load")]


def test_nothing_new_is_read_after_an_error_or_a_caller_that_stops() -> None:
    source = CountedSource(2, broken=NAMES[5])
    with pytest.raises(ModelLoadError, match="tensor 5"):
        list(fill_places(places(), source))
    assert len(source.read) <= 6 + AHEAD * 2

    source = CountedSource(2, broken="none")
    for name, _ in fill_places(places(), source):
        if name == NAMES[2]:
            break
    assert len(source.read) <= 3 + AHEAD * 2
