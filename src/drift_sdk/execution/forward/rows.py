"""The rows of a step on the device, as all forward passes take them."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk.execution.device.workspace import Workspace

__all__ = ["Rows"]


class Rows(Struct, frozen=True):
    """The rows of a step on the device, int32 [R] each: slot (-1: padding row), token, and its position.

    kv_slot [R] int64, path [R, PATH_ENTRIES] int32: of nodes of trees, where their keys and values lie and
    which nodes they see; see `tree_rows`.
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    kv_slot: Tensor | None = None
    path: Tensor | None = None

    @classmethod
    def take(cls, workspace: Workspace, num_rows: int) -> Rows:
        """Uninitialised rows in the buffers that all rounds share."""

        def take(name: str) -> Tensor:
            return workspace.take(f"row_{name}", (num_rows,), torch.int32)

        return cls(slot=take("slot"), token=take("token"), position=take("position"))

    def planned(self, rows_per_sequence: int) -> PlannedRows:
        """The rows as attention takes them."""
        return PlannedRows(self.slot, self.position, rows_per_sequence)
