"""The output of each slot's last row, which a draft keeps from one step to the next.

Grid (rows,): a program owns a row, and copies it if the next row is of another slot. Bytes: a row in and a
row out for each slot of the step.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.layers.rms_norm import norm_warps

__all__ = ["keep_last_rows"]


@kernel
def _keep_last_rows(
    row_slot_ptr,  # [R] int32
    output_ptr,  # [R, SIZE]
    state_ptr,  # [S, SIZE], written
    num_rows,  # R
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # SIZE as a power of two
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    following = tl.load(row_slot_ptr + row + 1, mask=row + 1 < num_rows, other=-1)
    if (slot >= 0) & (slot != following):
        column = tl.arange(0, PADDED_COLUMNS)
        is_column = column < SIZE
        values = tl.load(output_ptr + row.to(tl.int64) * SIZE + column, mask=is_column, other=0.0)
        tl.store(state_ptr + slot.to(tl.int64) * SIZE + column, values, mask=is_column)


def keep_last_rows(row_slot: Tensor, output: Tensor, state: Tensor) -> None:
    """state[slot] = the last of the slot's rows of output, for state [S, H] and output [R, H] of one type.

    row_slot [R] int32: a slot's rows stand together; -1: padding. Raises ValueError for another shape, type
    or layout.
    """
    num_rows, size = output.shape
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("output", output, (num_rows, size), state.dtype)
    check_tensor("state", state, (state.shape[0], size), state.dtype)
    _keep_last_rows[(num_rows,)](
        row_slot,
        output,
        state,
        num_rows,
        SIZE=size,
        PADDED_COLUMNS=next_power_of_2(size),
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )
