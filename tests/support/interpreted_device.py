"""A device without a GPU: each replay runs the captured step again, in Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch


class InterpretedReplay:
    def __init__(self, device: InterpretedDevice, step: Callable[[], None]) -> None:
        self._device, self._step = device, step
        self.num_launches = 0

    def launch(self) -> None:
        assert not self._device.is_capturing, "launched before finish_captures"
        self.num_launches += 1
        with torch.inference_mode():
            self._step()

    def close(self) -> None:
        pass


class InterpretedEvent:
    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    @property
    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def seconds_since(self, earlier: InterpretedEvent) -> float:
        return self._at - earlier._at


class InterpretedDevice:
    """is_capturing: whether a step was captured since the captures were finished last."""

    is_capturing = False
    torch_device = torch.device("cpu")
    num_allocations = 0

    def work(self) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def compile_kernels(
        self, steps: Iterable[Callable[[], None]], on_progress: Callable[[float], None]
    ) -> None:
        pass

    def warm_up(self, step: Callable[[], None]) -> None:
        pass

    def capture(self, step: Callable[[], None]) -> InterpretedReplay:
        self.is_capturing = True
        return InterpretedReplay(self, step)

    def finish_captures(self) -> None:
        self.is_capturing = False

    def event(self) -> InterpretedEvent:
        return InterpretedEvent()

    def close(self) -> None:
        pass


class FirstRunDevice(InterpretedDevice):
    """Runs a step before it is captured, as a GPU does."""

    def capture(self, step: Callable[[], None]) -> InterpretedReplay:
        with self.work():
            step()
        return super().capture(step)
