"""Allocations on a device while an executor serves, which should need none."""

from __future__ import annotations

from drift_sdk.execution.device.device import Device

__all__ = ["AllocationCount"]

COUNT_EVERY = 256  # steps: asking torch takes as long as launching one


class AllocationCount:
    """Counts them from when it is made on, whoever in the process makes them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_counted = device.num_allocations
        self._num_steps = 0

    def step(self) -> int:
        """To be called once a step: how many there were since the last count; 0 where none is due."""
        self._num_steps += 1
        if self._num_steps % COUNT_EVERY:
            return 0

        before, self._num_counted = self._num_counted, self._device.num_allocations
        return self._num_counted - before
