"""Streams that engines use one after the other, prepared on a thread."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cuda.core")

from drift_sdk.execution.device import streams
from drift_sdk.execution.device.streams import (
    prepared_stream,
    return_stream,
    take_stream,
    wait_for_preparation,
)

INDEX = 7
"""Of a GPU that no machine of the tests has."""


class Scratch:
    """Memory of a preparation."""


class FakeDevice:
    """A device of cuda.core. current_on: threads where it was made the current one."""

    current_on: ClassVar[list[int]] = []

    def __init__(self, index: int) -> None:
        assert index == INDEX

    def set_current(self) -> None:
        self.current_on.append(threading.get_ident())


def context(entered: list[tuple[int, object]]) -> Callable[[object], Any]:
    """A context manager that notes thread and argument in `entered`."""

    @contextmanager
    def noted(argument: object) -> Iterator[None]:
        entered.append((threading.get_ident(), argument))
        yield

    return noted


@pytest.fixture
def entered() -> list[tuple[int, object]]:
    """Threads, and the GPUs and streams that were made torch's current ones there."""
    return []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, entered: list[tuple[int, object]]) -> Iterator[list[object]]:
    """The streams that are made, without a GPU. Afterwards nothing is left of a preparation."""
    found: list[object] = []

    def make(index: int) -> object:
        assert index == INDEX
        found.append(object())
        return found[-1]

    monkeypatch.setattr(streams, "CudaDevice", FakeDevice)
    monkeypatch.setattr(FakeDevice, "current_on", [])
    monkeypatch.setattr(streams, "_new_stream", make)
    monkeypatch.setattr(streams, "external_stream", lambda index, stream: stream)
    monkeypatch.setattr(torch.cuda, "device", context(entered))
    monkeypatch.setattr(torch.cuda, "stream", context(entered))
    yield found
    assert not streams._preparing and not streams._prepared
    assert "drift-library" not in [thread.name for thread in threading.enumerate()]
    streams._idle.pop(INDEX, None)


def test_a_stream_is_made_where_none_is_idle_and_used_again(made: list[object]) -> None:
    first, second = take_stream(INDEX), take_stream(INDEX)
    assert made == [first, second]
    return_stream(INDEX, first)
    assert take_stream(INDEX) is first
    assert len(made) == 2


def test_the_next_engine_takes_the_prepared_stream(
    made: list[object], entered: list[tuple[int, object]]
) -> None:
    may_end, ended_on = threading.Event(), list[int]()
    prepared_on: list[int] = []
    scratch = Scratch()
    kept = weakref.ref(scratch)

    def work(scratch: Scratch) -> None:
        assert torch.is_inference_mode_enabled()
        may_end.wait(10)
        ended_on.append(threading.get_ident())

    def prepare() -> Callable[[], None]:
        nonlocal scratch
        assert torch.is_inference_mode_enabled()
        prepared_on.append(threading.get_ident())
        given = partial(work, scratch)
        del scratch
        return given

    return_stream(INDEX, other := object())  # of an engine that was closed
    with prepared_stream(INDEX, prepare):
        prepared, *_ = streams._prepared.values()
        assert prepared is other and not made
        return_stream(INDEX, object())  # of an engine that is closed meanwhile
        assert take_stream(INDEX) is prepared  # before the work has ended
        assert not ended_on
        threading.Timer(0.05, may_end.set).start()
        wait_for_preparation(INDEX)
        assert prepared_on == [threading.get_ident()] and len(ended_on) == 1
        assert ended_on != prepared_on and FakeDevice.current_on == ended_on
        assert entered == [
            (thread, argument) for thread in (*prepared_on, *ended_on) for argument in (INDEX, prepared)
        ]
        assert kept() is None  # the memory is free
        wait_for_preparation(INDEX)  # for nothing
        assert take_stream(INDEX) is not prepared


def test_an_idle_stream_is_prepared_again(made: list[object]) -> None:
    return_stream(INDEX, first := take_stream(INDEX))
    done: list[bool] = []
    with prepared_stream(INDEX, lambda: lambda: done.append(True)):
        pass
    assert done and made == [first]
    assert streams._idle[INDEX] == [first]  # no engine has taken it


def test_the_thread_ends_with_a_start_that_fails(made: list[object]) -> None:
    """A thread that is in native code when the interpreter ends would abort the process."""
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyError), prepared_stream(INDEX, lambda: work):
        raise KeyError("a weight")
    assert ended and streams._idle[INDEX] == made


@pytest.mark.parametrize("is_on_thread", [False, True])
def test_an_error_of_preparation_is_logged(
    is_on_thread: bool, made: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    def prepare() -> Callable[[], None]:
        if not is_on_thread:
            fail()
        return fail

    with (
        caplog.at_level(logging.DEBUG, logger="drift_sdk"),
        prepared_stream(INDEX, prepare),
    ):
        wait_for_preparation(INDEX)
        assert "GPU 7 was not prepared: no memory" in caplog.text
        assert take_stream(INDEX) is made[0]


def test_a_stream_that_cannot_be_made_is_an_error_of_the_engine(
    made: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(index: int) -> object:
        raise RuntimeError("no context")

    monkeypatch.setattr(streams, "_new_stream", make)
    with (
        caplog.at_level(logging.DEBUG, logger="drift_sdk"),
        prepared_stream(INDEX, lambda: lambda: None),
    ):
        assert "GPU 7 was not prepared: no context" in caplog.text
        wait_for_preparation(INDEX)
        with pytest.raises(RuntimeError, match="no context"):
            take_stream(INDEX)
