"""The CUDA driver's library, with a stand-in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from drift_sdk import _cuda_driver
from drift_sdk._cuda_driver import ignore_other_captures, load_driver
from drift_sdk.models import allocation

THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


class FakeDriver:
    """modes: what threads have set, by name."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.modes = status, dict[str, int]()

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.status

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.modes[threading.current_thread().name] = mode._obj.value
        return 0


def use(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(_cuda_driver.ctypes, "CDLL", lambda name: driver)
    return driver


def test_mode_is_set_for_the_calling_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = use(FakeDriver(), monkeypatch)
    with ThreadPoolExecutor(1, "own") as threads:
        threads.submit(ignore_other_captures).result()
    assert driver.modes == {"own_0": THREAD_LOCAL}


@pytest.mark.parametrize("status", [100, 999])
def test_machine_without_a_gpu_is_left_alone(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = use(FakeDriver(status), monkeypatch)
    assert load_driver() is None
    ignore_other_captures()
    assert driver.modes == {}


def test_machine_without_a_driver_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_cuda_driver.ctypes, "CDLL", no_library)
    assert load_driver() is None
    ignore_other_captures()


def test_graphs_are_instantiated_on_such_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    instantiation = pytest.importorskip("drift_sdk.execution.device.device")

    class Stream:
        def close(self) -> None: ...

    class Device:
        def create_stream(self, *, options: object) -> Stream:
            return Stream()

        def set_current(self) -> None: ...

    class Graph:
        def instantiate(self, options: object) -> str:
            return threading.current_thread().name

    driver = use(FakeDriver(), monkeypatch)
    instantiates = instantiation.Instantiation(Device())
    replay = instantiates.start(Graph(), None)
    instantiates.cancel()
    del replay
    assert list(driver.modes) == ["drift-graphs_0"]


def test_tensors_of_a_gpu_alone_are_read_on_such_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the driver is not even initialised: a program that forks may use it in its children."""

    class Source:
        num_readers = 2

        def read_into(self, name: str, place: Tensor) -> None:
            place.fill_(1.0)

    driver = use(FakeDriver(), monkeypatch)
    monkeypatch.setattr(allocation, "InPlaceSource", Source)
    places = {name: torch.zeros(2, dtype=torch.float32, device="cpu") for name in "ab"}
    assert [name for name, _ in allocation.fill_places(places, Source())] == ["a", "b"]
    assert driver.modes == {}

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    monkeypatch.setattr(allocation, "_fill_in", lambda *given: None)

    class Place:
        device = torch.device("cuda")

    list(allocation.fill_places({"a": Place(), "b": Place()}, Source()))
    assert set(driver.modes) <= {"drift-load_0", "drift-load_1"} and driver.modes
