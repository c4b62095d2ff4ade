"""The device resources that all steps of a graph executor share."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk.execution.device.device import Device
from drift_sdk.execution.device.host_ring import PayloadBuffer, Ring
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.stages import StageMarks


class DeviceResources(Struct, frozen=True, kw_only=True):
    """Device resources of captured steps.

    Code that needs only some of these takes them one by one.

    device:    the stream, events and captures.
    ring:      input and results of replays.
    payload:   the running replay's input on the device.
    table:     the slot table.
    workspace: buffers shared by all steps.
    stages:    marks around the stages of a step, for measuring.
    """

    device: Device
    ring: Ring
    payload: PayloadBuffer
    table: SlotTable
    workspace: Workspace
    stages: StageMarks
