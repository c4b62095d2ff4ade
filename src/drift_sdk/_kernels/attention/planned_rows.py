"""Rows of a step that attention is planned for, and the sequences that they belong to."""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensors
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.sizes import next_power_of_2

__all__ = ["MIN_PADDED_SEQUENCES", "PlannedRows", "sequences_of_rows"]

MIN_PADDED_SEQUENCES = 256
"""Least number of sequences that kernels of the plan are compiled for: steps of 1 to 256 share one."""


class PlannedRows(Struct, frozen=True):
    """Rows of a step that a plan is made of, equally many of each sequence.

    slot, position: [R] int32. A row sees positions 0 ... position of its slot, or the last `window` of these.
    Rows of slot -1 see nothing.
    rows_per_sequence: consecutive rows that belong to a sequence. With a window, those of them that see
    anything come first and have consecutive positions.
    """

    slot: Tensor
    position: Tensor
    rows_per_sequence: int

    @property
    def num_sequences(self) -> int:
        return self.slot.shape[0] // self.rows_per_sequence

    def of_rows(self, rows: slice) -> PlannedRows:
        """Some of the rows, those of whole sequences, or all."""
        if rows == slice(0, self.slot.shape[0]):
            return self

        return replace(self, slot=self.slot[rows], position=self.position[rows])

    def check(self, num_rows: int) -> None:
        """Raise ValueError for tensors of another shape, type or layout."""
        check_tensors((num_rows,), torch.int32, row_slot=self.slot, row_position=self.position)

    @property
    def padded_sequences(self) -> int:
        """The sequences that kernels are compiled for, a power of two."""
        return max(MIN_PADDED_SEQUENCES, next_power_of_2(self.num_sequences))


@device_function
def sequences_of_rows(
    row_slot_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32; -1: padding row
    row_position_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32
    num_sequences,
    ROWS_PER_SEQUENCE: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
):
    """Return of every sequence the keys that its last live row sees, its slot, and the position of its first
    live row; 0, -1 and the largest integer without a live row."""
    sequence = tl.arange(0, PADDED_SEQUENCES)
    is_sequence = sequence < num_sequences
    num_keys = tl.zeros_like(sequence)
    slots = num_keys - 1
    first_position = num_keys + 0x7FFFFFFF
    for row in tl.static_range(ROWS_PER_SEQUENCE):
        index = sequence * ROWS_PER_SEQUENCE + row
        slot = tl.load(row_slot_ptr + index, mask=is_sequence, other=-1)
        position = tl.load(row_position_ptr + index, mask=is_sequence, other=0)
        is_live = slot >= 0
        num_keys = tl.maximum(num_keys, tl.where(is_live, position + 1, 0))
        slots = tl.maximum(slots, slot)
        first_position = tl.minimum(first_position, tl.where(is_live, position, 0x7FFFFFFF))
    return num_keys, slots, first_position
