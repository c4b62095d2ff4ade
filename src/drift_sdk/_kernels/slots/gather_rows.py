"""The rows of a step, made of its slots: the first kernel of a decode round after `enter`.

Every slot has the same number of rows, at consecutive positions: the row of its newest token, then one row
for each token that may be drafted behind it. Grid: one program, which owns all rows. Bytes: 24 a slot, 12 a
row.

Programmatic dependent launch: it waits for its producers before its first read and, being short, lets its
dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.slots.slot_columns import SlotState

__all__ = ["gather_rows"]

MIN_PADDED_ROWS = 16
"""Least number of rows that a program is compiled for: steps of 1 to 16 rows share one."""


@kernel(
    do_not_specialize=["num_rows", "rows_per_slot"],
    do_not_specialize_on_alignment=["max_drafts_ptr"],
)
def _gather_rows(
    slots_ptr,  # [B] int32; -1: none
    max_drafts_ptr,  # [B] int32; not read where rows_per_slot is 1
    length_ptr,  # [S] int32
    last_token_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    max_length_ptr,  # [S] int32
    row_slot_ptr,  # [R] int32, written
    row_token_ptr,  # [R] int32, written
    row_position_ptr,  # [R] int32, written
    num_rows,
    rows_per_slot,
    PADDED_ROWS: tl.constexpr,  # R as a power of two
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.arange(0, PADDED_ROWS)
    is_row = row < num_rows
    depth = row % rows_per_slot
    is_draft = is_row & (depth > 0)
    slot = tl.load(slots_ptr + row // rows_per_slot, mask=is_row, other=-1)
    is_live = slot >= 0
    is_live &= tl.load(finish_ptr + slot, mask=is_live, other=1) == 0
    num_tokens = tl.load(length_ptr + slot, mask=is_live, other=1)
    token = tl.load(last_token_ptr + slot, mask=is_live & (depth == 0), other=-1)
    # A draft is verified only where there is room for the token behind it.
    max_depth = tl.load(max_drafts_ptr + row // rows_per_slot, mask=is_draft, other=0)
    room = tl.load(max_length_ptr + slot, mask=is_live & is_draft, other=0) - num_tokens - 1
    is_live &= (depth == 0) | (depth <= tl.minimum(max_depth, room))
    tl.store(row_slot_ptr + row, tl.where(is_live, slot, -1), mask=is_row)
    tl.store(row_token_ptr + row, token, mask=is_row)
    tl.store(row_position_ptr + row, num_tokens - 1 + depth, mask=is_row)


def gather_rows(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
) -> None:
    """Write R / B rows for each of slots [B] (-1: none), at consecutive positions.

    The first row of a slot is that of its newest token. At most max_drafts [B] rows follow it, and no more
    than leave room for a token behind the last; row_token of these is -1 until they are drafted. Rows beyond,
    and all rows of a slot that has finished, get slot -1. row_slot, row_token, row_position [R], written. All
    int32. max_drafts is not read where R is B.

    Raises ValueError for another shape or type.
    """
    (num_rows,), (num_slots,) = row_slot.shape, slots.shape
    check_tensor("slots", slots, (num_slots,), torch.int32)
    check_tensor("max_drafts", max_drafts, (num_slots,), torch.int32)
    state.check()
    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)
    if num_rows % num_slots:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {num_slots}")

    _gather_rows[(1,)](
        slots,
        max_drafts,
        state.length,
        state.last_token,
        state.finish,
        state.max_length,
        row_slot,
        row_token,
        row_position,
        num_rows,
        num_rows // num_slots,
        PADDED_ROWS=max(MIN_PADDED_ROWS, next_power_of_2(num_rows)),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
