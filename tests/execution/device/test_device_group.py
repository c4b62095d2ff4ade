"""Several devices as one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted_device import InterpretedDevice

from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.device import DeviceGroup, GroupReplay
from drift_sdk.execution.device.resources import Ring, RingSizes
from drift_sdk.execution.device.slot_table import NO_UPDATES


class SlowEvent:
    """An event that is reached at a time, in seconds; `now` is the clock's."""

    def __init__(self, at: float, now: Callable[[], float]) -> None:
        self.at, self._now = at, now
        self.timeouts: list[float | None] = []
        self.num_records = 0

    def record(self) -> None:
        self.num_records += 1

    @property
    def is_done(self) -> bool:
        return self._now() >= self.at

    def wait(self, timeout_s: float | None = None) -> None:
        self.timeouts.append(timeout_s)
        if timeout_s is not None and self.at > timeout_s:
            raise ExecutorError("too slow", process_unusable=True)

    def seconds_since(self, earlier: SlowEvent) -> float:
        return self.at - earlier.at


class SlowDevice(InterpretedDevice):
    num_allocations = 3

    def __init__(self, at: float) -> None:
        self.at, self.now, self.num_closed = at, 0.0, 0
        self.events: list[SlowEvent] = []

    def event(self) -> SlowEvent:
        self.events.append(SlowEvent(self.at, lambda: self.now))
        return self.events[-1]

    def close(self) -> None:
        self.num_closed += 1


def test_an_event_is_reached_when_all_devices_have_reached_it() -> None:
    devices = [SlowDevice(1.0), SlowDevice(2.0)]
    group = DeviceGroup(devices)
    event = group.event()
    event.record()
    assert [device.events[0].num_records for device in devices] == [1, 1]
    devices[0].now = devices[1].now = 1.5
    assert not event.is_done
    devices[1].now = 2.0
    assert event.is_done
    later = group.event()
    devices[0].events[1].at = 4.0
    assert later.seconds_since(event) == 3.0  # of the first device


def test_a_timeout_is_that_of_all_devices_together() -> None:
    devices = [SlowDevice(0.0), SlowDevice(5.0)]
    event = DeviceGroup(devices).event()
    with pytest.raises(ExecutorError, match="within 1 s") as found:
        event.wait(1.0)
    assert found.value.process_unusable
    assert devices[0].events[0].timeouts[0] <= 1.0 and devices[1].events[0].timeouts[0] <= 1.0
    event.wait()
    assert devices[1].events[0].timeouts[1] is None


def test_a_group_counts_and_closes_all_devices() -> None:
    devices = [SlowDevice(0.0), SlowDevice(0.0)]
    group = DeviceGroup(devices)
    assert group.num_allocations == 6 and group.torch_device == torch.device("cpu")
    group.close()
    assert [device.num_closed for device in devices] == [1, 1]


def test_a_replay_of_a_group_launches_and_closes_all() -> None:
    calls: list[str] = []

    class Replay:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(self) -> None:
            calls.append(f"launch {self.name}")

        def close(self) -> None:
            calls.append(f"close {self.name}")

    replay = GroupReplay([Replay("a"), Replay("b")])
    replay.launch()
    replay.close()
    assert calls == ["launch a", "launch b", "close a", "close b"]


def test_a_further_gpu_shares_the_input_of_a_ring_and_not_its_indices() -> None:
    sizes = RingSizes(
        num_entries=2,
        max_updates=4,
        payload_words=4,
        record_words=4,
        max_slots=1,
        num_draft_masks=1,
        mask_words=1,
    )
    ring = Ring(InterpretedDevice(), sizes)
    other = ring.on(InterpretedDevice())
    ring.payload(ring.acquire(NO_UPDATES))[:] = 7
    assert other.input.data_ptr() == ring.input.data_ptr() and (other.input == 7).any()
    assert other.masks.data_ptr() == ring.masks.data_ptr()
    for name in ("output", "next_index", "current"):
        assert getattr(other, name).data_ptr() != getattr(ring, name).data_ptr()
    other.next_index.fill_(1)
    other.reset()
    assert int(other.next_index) == 0
