"""Graphs are instantiated on a thread of their own, in the order of captures."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

pytest.importorskip("cuda.core")

from drift_sdk.execution.device.device import Instantiation


class FakeStream:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def sync(self) -> None:
        self._calls.append("sync")

    def close(self) -> None:
        self._calls.append("close")


class FakeDevice:
    """A device of cuda.core. current_on: threads where it is the current one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = FakeStream(self.calls)
        self.current_on: list[int] = []

    def create_stream(self, *, options: Any) -> FakeStream:
        assert options.nonblocking
        return self.stream

    def set_current(self) -> None:
        self.current_on.append(threading.get_ident())


class FakeInstance:
    def __init__(self) -> None:
        self.launched_in: list[object] = []
        self.is_closed = False

    def launch(self, stream: object) -> None:
        self.launched_in.append(stream)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class FakeGraph:
    """The graph of a captured step. gate: to be set before it is instantiated. error: raised then."""

    def __init__(self, gate: threading.Event | None = None, error: Exception | None = None) -> None:
        self.instance, self._gate, self._error = FakeInstance(), gate, error
        self.instantiated_on: int | None = None
        self.upload_stream: object = None

    def instantiate(self, options: Any) -> FakeInstance:
        if self._gate is not None:
            assert self._gate.wait(10)
        self.instantiated_on, self.upload_stream = threading.get_ident(), options.upload_stream
        if self._error is not None:
            raise self._error

        return self.instance


def test_replays_can_be_launched_once_all_graphs_are_instantiated() -> None:
    device, gate, stream = FakeDevice(), threading.Event(), object()
    graphs = [FakeGraph(gate), FakeGraph()]
    instantiation = Instantiation(device)
    replays = [instantiation.start(graph, stream) for graph in graphs]
    assert [graph.instantiated_on for graph in graphs] == [None, None]  # one after the other
    gate.set()
    instantiation.finish()
    threads = [graph.instantiated_on for graph in graphs]
    assert threads == device.current_on and len({*threads, threading.get_ident()}) == 2
    assert all(graph.upload_stream is device.stream for graph in graphs)
    assert device.calls == ["sync", "close"]
    for replay, graph in zip(replays, graphs, strict=True):
        replay.launch()
        assert graph.instance.launched_in == [stream]
        replay.close()
        replay.close()
        assert graph.instance.is_closed


def test_finish_raises_the_first_error() -> None:
    instantiation = Instantiation(FakeDevice())
    for graph in (
        FakeGraph(),
        FakeGraph(error=RuntimeError("first")),
        FakeGraph(error=ValueError("second")),
    ):
        instantiation.start(graph, object())
    with pytest.raises(RuntimeError, match="first"):
        instantiation.finish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drift-graphs")]
    instantiation.cancel()


def test_cancelled_graphs_are_not_instantiated() -> None:
    gate = threading.Event()
    graphs = [FakeGraph(gate), FakeGraph()]
    instantiation = Instantiation(FakeDevice())
    replays = [instantiation.start(graph, object()) for graph in graphs]
    instance = weakref.ref(graphs[0].instance)
    threading.Timer(0.05, gate.set).start()
    instantiation.cancel()
    assert [graph.instantiated_on is None for graph in graphs] == [False, True]
    graphs.clear()
    assert instance() is None
    replays[0].close()  # nothing to close


def test_an_error_of_the_device_is_raised_as_it_is() -> None:
    """The engine reads from it whether the process can go on."""

    class LostDevice(FakeDevice):
        def set_current(self) -> None:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    instantiation = Instantiation(LostDevice())
    instantiation.start(FakeGraph(), object())
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        instantiation.finish()


def test_cancel_closes_the_stream_of_uploads() -> None:
    device = FakeDevice()
    instantiation = Instantiation(device)
    instantiation.start(FakeGraph(error=RuntimeError("first")), object())
    with pytest.raises(RuntimeError, match="first"):
        instantiation.finish()
    assert device.calls == []
    instantiation.cancel()
    assert device.calls == ["close"]
