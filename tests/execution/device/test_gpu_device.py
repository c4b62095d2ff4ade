"""Captures of a GPU's device object, with stand-ins for the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core")

from drift_sdk.execution.device import device as device_module
from drift_sdk.execution.device.device import GpuDevice


class FakeInstantiation:
    def __init__(self, device: object) -> None:
        self.device, self.calls = device, list[object]()

    def start(self, graph: object, stream: object) -> object:
        self.calls.append((graph, stream))
        return graph

    def finish(self) -> None:
        self.calls.append("finish")

    def cancel(self) -> None:
        self.calls.append("cancel")


class FakePool:
    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def allocations(self) -> Iterator[None]:
        self.calls.append("begin")
        yield
        self.calls.append("end")

    def release(self) -> None:
        self.calls.append("release")


class FakeStream:
    handle = 11

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sync(self) -> None:
        self.calls.append("sync")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeInstantiation]:
    """The instantiations that a device makes."""
    found: list[FakeInstantiation] = []

    def make(device: object) -> FakeInstantiation:
        found.append(FakeInstantiation(device))
        return found[-1]

    @contextmanager
    def nothing(*arguments: Any) -> Iterator[None]:
        yield

    def capture(stream: int, step: Callable[[], None]) -> object:
        assert stream == FakeStream.handle
        step()
        return object()

    monkeypatch.setattr(device_module, "Instantiation", make)
    monkeypatch.setattr(device_module, "captured_graph", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(GpuDevice, "work", nothing)
    return found


@pytest.fixture
def device() -> GpuDevice:
    found = object.__new__(GpuDevice)
    found._device, found._stream = SimpleNamespace(device_id=7), FakeStream()
    found._pool, found._instantiation = FakePool(), None
    return found


def test_captures_are_instantiated_together_and_finished(
    device: GpuDevice, made: list[FakeInstantiation]
) -> None:
    steps: list[int] = []
    replays = [device.capture(lambda: steps.append(1)) for _ in range(2)]
    assert steps == [1, 1, 1, 1]  # a first run each
    assert device._stream.calls == ["sync"] * 2
    assert [each.calls for each in made] == [[(replay, device._stream) for replay in replays]]
    assert made[0].device is device._device
    device.finish_captures()
    device.finish_captures()  # nothing is left
    assert made[0].calls[2:] == ["finish"]
    device.capture(lambda: None)
    assert len(made) == 2 and made[0].calls[2:] == ["finish"]


def test_closing_cancels_what_was_not_finished(
    device: GpuDevice, made: list[FakeInstantiation], monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[object] = []
    monkeypatch.setattr(device_module, "return_stream", lambda *given: returned.append(given))

    def fail() -> None:
        raise RuntimeError("a step")

    stream = device._stream
    device.capture(lambda: None)
    with pytest.raises(RuntimeError, match="a step"):
        device.capture(fail)
    device.close()
    assert made[0].calls[1:] == ["cancel"]
    assert returned == [(7, stream)] and stream.calls[-1] == "sync"


def test_closing_a_device_whose_captures_are_finished_cancels_nothing(
    device: GpuDevice, made: list[FakeInstantiation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "return_stream", lambda *given: None)
    device.capture(lambda: None)
    device.finish_captures()
    device.close()
    assert made[0].calls[1:] == ["finish"]
    assert device._pool.calls == ["begin", "end", "release"]
