"""A wait for a stream that ends when the stream posts its semaphore, or after a time."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import pytest

from drift_sdk.execution.device import streams
from drift_sdk.execution.device.streams import StreamSignal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA graphs run on Linux")
LONG_S = 60.0


class Stream:
    handle = 5

    def __init__(self) -> None:
        self.events: list[object] = []

    def wait(self, event: object) -> None:
        self.events.append(event)


class CudaDevice:
    def __init__(self) -> None:
        self.stream = Stream()

    def create_stream(self, options: Any) -> Stream:
        assert options.nonblocking
        return self.stream


class Launched:
    """Stands in for the driver: keeps host functions and calls them as the driver's thread does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.calls: list[tuple[int, int]] = []
        self._fails = fails
        monkeypatch.setattr(streams.cuda_driver, "cuLaunchHostFunc", self._launch)

    def _launch(self, stream: int, function: Any, data: int) -> tuple[Any]:
        assert stream == Stream.handle
        self.calls.append((int(function), data))
        result = streams.cuda_driver.CUresult
        return (result.CUDA_ERROR_INVALID_VALUE if self._fails else result.CUDA_SUCCESS,)

    def call_first(self) -> None:
        address, data = self.calls.pop(0)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(data)


def test_wait_ends_when_the_stream_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    device, driver = CudaDevice(), Launched(monkeypatch)
    signal, event = StreamSignal(device), object()
    signal.after(event)
    assert device.stream.events == [event]
    poster = threading.Thread(target=driver.call_first)
    poster.start()
    started_at = time.monotonic()
    signal.wait(LONG_S)
    poster.join()
    assert time.monotonic() - started_at < LONG_S


def test_wait_ends_after_its_time_and_a_late_post_ends_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Launched(monkeypatch)
    signal = StreamSignal(CudaDevice())
    signal.after(object())
    started_at = time.monotonic()
    signal.wait(0.02)
    assert time.monotonic() - started_at >= 0.02
    driver.call_first()
    signal.wait(LONG_S)  # the caller asks its event, and waits again
    signal.wait(0.0)


def test_failure_of_the_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Launched(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="cuLaunchHostFunc"):
        StreamSignal(CudaDevice()).after(object())
