"""Times of steps: with stand-ins for torch's streams and graphs, and on a GPU beside another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from drift_sdk._kernels.gemm import tuner
from drift_sdk._kernels.gemm.tuner import time_us


class FakeGpu:
    """Measurements take `milliseconds`, one after the other. calls: of streams and graphs, in order."""

    def __init__(self, milliseconds: list[float]) -> None:
        self.milliseconds, self.calls = milliseconds, list[str]()

    def synchronize(self) -> None:
        self.calls.append("wait")

    def wait_stream(self, other: object) -> None:
        self.calls.append("follow")

    def capture_begin(self, *, capture_error_mode: str) -> None:
        self.calls.append(capture_error_mode)

    def capture_end(self) -> None:
        self.calls.append("captured")

    def replay(self) -> None:
        self.calls.append("replay")

    def record(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return self.milliseconds.pop(0)


@contextmanager
def current(stream: object) -> Iterator[None]:
    yield


def fake(monkeypatch: pytest.MonkeyPatch, milliseconds: list[float]) -> FakeGpu:
    gpu = FakeGpu(milliseconds)
    tuner._stream.cache_clear()
    for name in ("Stream", "CUDAGraph", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **options: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return gpu


@pytest.fixture(autouse=True)
def forget_stream() -> Iterator[None]:
    yield
    tuner._stream.cache_clear()


def test_median_of_the_measurements_after_as_many_that_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake(monkeypatch, [90.0, 80.0, 70.0, 8.0, 2.0, 4.0])
    assert time_us(lambda: gpu.calls.append("step"), 10, num_timings=3) == 100.0  # 4 ms, 4 replays, 10 calls
    once = ["follow", "step", "wait", "thread_local", "step", "captured"]
    assert gpu.calls == [*once, *(["replay"] * 4 + ["wait"]) * 6]


def test_an_error_of_the_step_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake(monkeypatch, [])

    def step() -> None:
        if "thread_local" in gpu.calls:
            raise ValueError("a step")

    with pytest.raises(ValueError, match="a step"):
        time_us(step, 1)
    assert gpu.calls[-1] == "captured"


@pytest.mark.gpu
def test_other_threads_use_the_gpu_while_a_step_is_captured() -> None:
    x, found = torch.zeros(1000, device="cuda"), list[float]()

    def allocate() -> None:
        torch.cuda.empty_cache()
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(torch.ones(1 << 24, device="cuda").sum().item())

    def step() -> None:
        x.add_(1.0)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()

    assert time_us(step, 1, num_timings=1) > 0.0
    assert found == [2.0**24] * 2
