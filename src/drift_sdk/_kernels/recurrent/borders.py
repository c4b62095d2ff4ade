"""The positions of stored states, by slot.

A border moves with what stores the state: before a step whose prompts store it at their ends, and after a
round, which stored it at the last border up to its first rows. Grid: one program.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_range, check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv
from drift_sdk.spec.states import BORDER

__all__ = ["move_borders_of_prompts", "move_borders_of_rows"]

BLOCK = 256


@kernel
def _move_borders(
    slot_ptr,  # int32, every `stride`-th one: slots, -1: none
    position_ptr,  # likewise
    count_ptr,  # likewise, added to the position; or None
    borders_ptr,  # [S] int32, written
    number,
    stride,
    BLOCK: tl.constexpr,
    BORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_producers(PDL)
    start_dependents(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + place * stride, mask=place < number, other=-1)
    position = tl.load(position_ptr + place * stride, mask=slot >= 0, other=0)
    if count_ptr is not None:
        position += tl.load(count_ptr + place * stride, mask=slot >= 0, other=0)
    tl.store(borders_ptr + slot, position // BORDER * BORDER, mask=slot >= 0)


def move_borders_of_rows(borders: Tensor, row_slot: Tensor, row_position: Tensor, rows_per_slot: int) -> None:
    """Move the borders [S] int32 of slots to the last one up to their first rows.

    row_slot, row_position [N] int32, contiguous: `rows_per_slot` rows of each of some slots. Raises
    ValueError for another shape, type or layout.
    """
    check_range("rows_per_slot", rows_per_slot, 1)
    number = row_slot.shape[0] // rows_per_slot
    check_tensor("row_slot", row_slot, (number * rows_per_slot,), torch.int32)
    check_tensor("row_position", row_position, (number * rows_per_slot,), torch.int32)
    _move(borders, row_slot, row_position, None, number, rows_per_slot)


def move_borders_of_prompts(borders: Tensor, runs: Tensor) -> None:
    """Move the borders [S] int32 of slots to the last one up to the end of their runs [M, 4], see PromptRuns.
    A run without rows may be of a prompt that goes on in a round of the same step. Raises ValueError for
    another shape, type or layout."""
    num_runs = runs.shape[0]
    check_tensor("runs", runs, (num_runs, 4), torch.int32)
    slot, start, _, count = runs.unbind(1)
    _move(borders, slot, start, count, num_runs, 4)


def _move(
    borders: Tensor, slot: Tensor, position: Tensor, count: Tensor | None, number: int, stride: int
) -> None:
    check_tensor("borders", borders, (borders.numel(),), torch.int32)
    _move_borders[(cdiv(number, BLOCK),)](
        slot_ptr=slot,
        position_ptr=position,
        count_ptr=count,
        borders_ptr=borders,
        number=number,
        stride=stride,
        BLOCK=BLOCK,
        BORDER=BORDER,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
