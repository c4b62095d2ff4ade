"""Captures of steps, with stand-ins for the driver; on a GPU, beside threads that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cuda.core")

from cuda.bindings import driver

from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device import device as device_module
from drift_sdk.execution.device.device import MAX_CAPTURES, captured_graph, is_kept

STREAM = 11
SUCCESS, INVALIDATED = device_module.SUCCESS, device_module.INVALIDATED


class FakeGraph:
    handle = 5
    made: ClassVar[list[FakeGraph]] = []

    def __init__(self) -> None:
        self.made.append(self)


class FakeDriver:
    """A driver that ends captures with `statuses`, then without an error."""

    def __init__(self, statuses: list[Any]) -> None:
        self.statuses, self.num_begun, self.num_ended, self.begin_status = statuses, 0, 0, SUCCESS

    def begin(self, stream: int, graph: int, *arguments: Any) -> tuple[Any]:
        assert (stream, graph) == (STREAM, FakeGraph.handle)
        assert arguments == (None, None, 0, device_module.MODE)
        assert self.num_begun == self.num_ended
        self.num_begun += 1
        return (self.begin_status,)

    def end(self, stream: int) -> tuple[Any, object]:
        assert stream == STREAM
        self.num_ended += 1
        return (self.statuses.pop(0) if self.statuses else SUCCESS), None


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    def make(*statuses: Any) -> FakeDriver:
        found = FakeDriver([*statuses])
        functions = {"cuStreamBeginCaptureToGraph": found.begin, "cuStreamEndCapture": found.end}
        monkeypatch.setattr(device_module, "driver", SimpleNamespace(**functions))
        monkeypatch.setattr(device_module, "GraphDefinition", FakeGraph)
        monkeypatch.setattr(FakeGraph, "made", [])
        return found

    return make


def test_a_step_is_captured_once(driver_of: Callable[..., FakeDriver]) -> None:
    fake, steps = driver_of(), list[int]()
    assert isinstance(captured_graph(STREAM, lambda: steps.append(fake.num_ended)), FakeGraph)
    assert steps == [0]
    assert fake.num_begun == fake.num_ended == 1


def test_an_ended_capture_is_made_again(driver_of: Callable[..., FakeDriver]) -> None:
    fake, steps = driver_of(INVALIDATED, INVALIDATED), list[int]()

    def step() -> None:
        steps.append(len(steps))
        if len(steps) == 1:  # launches fail after another thread has ended the capture
            raise RuntimeError("operation failed due to a previous error during capture")

    graph = captured_graph(STREAM, step)
    assert len(steps) == fake.num_begun == fake.num_ended == 3
    assert [is_kept(each) for each in FakeGraph.made] == [True, True, False]  # the driver has freed two
    assert graph is FakeGraph.made[-1]


def test_captures_that_never_last_are_an_error(driver_of: Callable[..., FakeDriver]) -> None:
    fake = driver_of(*[INVALIDATED] * MAX_CAPTURES)

    def step() -> None:
        raise ValueError("launches")

    with pytest.raises(ExecutorError, match="torch.cuda.synchronize") as caught:
        captured_graph(STREAM, step)
    ended = caught.value.__cause__
    assert ended is not None and str(ended.__cause__) == "launches"
    assert fake.num_ended == MAX_CAPTURES


@pytest.mark.parametrize("error", [RuntimeError("a step"), KeyboardInterrupt()])
def test_errors_of_a_step_end_the_capture(driver_of: Callable[..., FakeDriver], error: BaseException) -> None:
    fake = driver_of()

    def step() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        captured_graph(STREAM, step)
    assert caught.value is error
    assert not is_kept(FakeGraph.made[0])
    assert fake.num_begun == fake.num_ended == 1


def test_errors_of_the_driver_have_its_names(driver_of: Callable[..., FakeDriver]) -> None:
    """The engine reads from the names whether the process can go on."""
    lost = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    fake = driver_of(lost)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        captured_graph(STREAM, lambda: None)
    fake.begin_status = lost
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        captured_graph(STREAM, lambda: None)
    assert (fake.num_begun, fake.num_ended) == (2, 1)
    assert [is_kept(each) for each in FakeGraph.made] == [True, False]  # the second was never captured into


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ended", [1, MAX_CAPTURES])
def test_another_thread_waits_for_the_gpu(ended: int) -> None:
    """Its call fails, and the capture is made again."""
    from drift_sdk.execution.device.device import GpuDevice

    device = GpuDevice(0)
    with device.work():
        x = torch.zeros(1000, device="cuda")
    errors, runs = list[Exception](), list[int]()

    def wait_for_gpu() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            errors.append(error)

    def step() -> None:
        x.add_(1.0)
        runs.append(1)
        if 1 < len(runs) <= 1 + ended:  # the first run is not captured
            thread = threading.Thread(target=wait_for_gpu)
            thread.start()
            thread.join()
        x.add_(1.0)

    try:
        if ended == MAX_CAPTURES:
            with pytest.raises(ExecutorError, match="torch.cuda.synchronize"):
                device.capture(step)
        else:
            replay = device.capture(step)
            device.finish_captures()
            with device.work():
                x.zero_()
                replay.launch()
                assert x.sum().item() == 2000.0
            replay.close()
        assert len(errors) == ended
        assert len(runs) == (1 + MAX_CAPTURES if ended == MAX_CAPTURES else 2 + ended)
    finally:
        device.close()
