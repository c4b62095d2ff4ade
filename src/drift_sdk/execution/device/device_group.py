"""Several GPUs that run the same steps at the same time, as one device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.device import Event, Replay, ServingDevice, step_timeout

__all__ = ["DeviceGroup", "GroupEvent", "GroupReplay"]


class GroupReplay:
    """The graphs of one step on all GPUs, launched one right after the other."""

    def __init__(self, replays: Sequence[Replay]) -> None:
        self._replays = replays

    def launch(self) -> None:
        for replay in self._replays:
            replay.launch()

    def close(self) -> None:
        for replay in self._replays:
            replay.close()


class GroupEvent:
    """A mark in the streams of all GPUs, reached when all have reached it."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def record(self) -> None:
        for event in self._events:
            event.record()

    @property
    def is_done(self) -> bool:
        return all(event.is_done for event in self._events)

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for event in self._events:
            if deadline is None or timeout_s is None:
                event.wait()
                continue

            try:
                event.wait(max(deadline - time.monotonic(), 0.0))
            except ExecutorError as error:
                raise step_timeout(timeout_s) from error  # of all GPUs, not of what others have left of it

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two marks on the first GPU."""
        assert isinstance(earlier, GroupEvent)
        return self._events[0].seconds_since(earlier._events[0])


class DeviceGroup:
    """The GPUs of a tensor-parallel model. `torch_device` and `work` are those of the first one."""

    def __init__(self, devices: Sequence[ServingDevice]) -> None:
        self._devices = devices
        self.torch_device = devices[0].torch_device

    @property
    def num_allocations(self) -> int:
        return sum(device.num_allocations for device in self._devices)

    def work(self) -> AbstractContextManager[None]:
        return self._devices[0].work()

    def event(self) -> Event:
        return GroupEvent([device.event() for device in self._devices])

    def close(self) -> None:
        for device in self._devices:
            device.close()
