"""Streams that engines use one after the other, prepared on a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cuda.core")

from drift_sdk.execution.device import streams
from drift_sdk.execution.device.streams import (
    prepare_stream,
    return_stream,
    take_stream,
    wait_for_preparation,
)

INDEX = 7
"""Of a GPU that no machine of the tests has."""


class FakeDevice:
    """A device of cuda.core. current_on: threads where it was made the current one."""

    current_on: ClassVar[list[int]] = []

    def __init__(self, index: int) -> None:
        assert index == INDEX

    def set_current(self) -> None:
        self.current_on.append(threading.get_ident())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams that are made, without a GPU."""
    found: list[object] = []

    def make(index: int) -> object:
        assert index == INDEX
        found.append(object())
        return found[-1]

    def nothing(*arguments: Any) -> Any:
        return nullcontext()

    monkeypatch.setattr(streams, "CudaDevice", FakeDevice)
    monkeypatch.setattr(FakeDevice, "current_on", [])
    monkeypatch.setattr(streams, "_new_stream", make)
    monkeypatch.setattr(streams, "external_stream", lambda index, stream: stream)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    yield found
    wait_for_preparation(INDEX)
    streams._idle.pop(INDEX, None)


def test_a_stream_is_made_where_none_is_idle_and_used_again(made: list[object]) -> None:
    first, second = take_stream(INDEX), take_stream(INDEX)
    assert made == [first, second]
    return_stream(INDEX, first)
    assert take_stream(INDEX) is first
    assert len(made) == 2


def test_the_next_engine_takes_the_prepared_stream(
    made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: (entered.append(stream), nullcontext())[1])
    may_end, ended_on = threading.Event(), list[int]()

    def work() -> None:
        assert torch.is_inference_mode_enabled()
        may_end.wait(10)
        ended_on.append(threading.get_ident())

    def prepare() -> Callable[[], None]:
        assert torch.is_inference_mode_enabled()
        prepared_on.append(threading.get_ident())
        return work

    prepared_on: list[int] = []
    prepare_stream(INDEX, prepare)
    assert prepared_on == [threading.get_ident()]
    assert take_stream(INDEX) is made[0]  # before the work has ended
    assert not ended_on
    may_end.set()
    wait_for_preparation(INDEX)
    assert len(ended_on) == 1 and ended_on[0] != threading.get_ident()
    assert FakeDevice.current_on == ended_on
    assert entered == made * 2
    wait_for_preparation(INDEX)  # for nothing


def test_an_idle_stream_is_prepared_again(made: list[object]) -> None:
    return_stream(INDEX, take_stream(INDEX))
    done: list[bool] = []
    prepare_stream(INDEX, lambda: lambda: done.append(True))
    wait_for_preparation(INDEX)
    assert done and len(made) == 1
    assert take_stream(INDEX) is made[0]


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

    with caplog.at_level(logging.DEBUG, logger="drift_sdk"):
        prepare_stream(INDEX, prepare)
        wait_for_preparation(INDEX)
    assert "GPU 7 was not prepared: no memory" in caplog.text
    assert take_stream(INDEX) is made[0]


def test_a_stream_that_cannot_be_made_is_an_error_of_the_engine(
    made: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(index: int) -> object:
        raise RuntimeError("no context")

    monkeypatch.setattr(streams, "_new_stream", make)
    with caplog.at_level(logging.DEBUG, logger="drift_sdk"):
        prepare_stream(INDEX, lambda: lambda: None)
    assert "GPU 7 was not prepared: no context" in caplog.text
    wait_for_preparation(INDEX)
    with pytest.raises(RuntimeError, match="no context"):
        take_stream(INDEX)
