"""Which rows of a prompt a program of the draft's prefill attention has: `prefill_tiles` on the device.

A tile ends with its slot's rows, and at multiples of its size. The tiles stand in falling order of their
rows: of a long chunk, those that see most keys come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS
from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["draft_tiles", "draft_tiles_reference", "num_draft_tiles"]

CHUNK = 1024
NUM_FIELDS = tl.constexpr(TILE_FIELDS)


def num_draft_tiles(num_rows: int, num_chunks: int, tile_rows: int) -> int:
    """How many tiles there are room for, used or not."""
    return -(-num_rows // tile_rows) + 2 * num_chunks


@triton.jit
def _starts(row_slot, row, num_rows, TILE_ROWS: tl.constexpr):
    """The slots of some rows, and which of the rows begin a tile."""
    slot = tl.load(row_slot + row, mask=row < num_rows, other=-1)
    before = tl.load(row_slot + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
    return slot, (slot >= 0) & ((slot != before) | (row % TILE_ROWS == 0))


@triton.jit
def _draft_tiles(
    row_slot, row_position, tiles, num_rows, num_single, num_tiles,
    TILE_ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p has rows p * TILE_ROWS ...; the last one the single rows, and the tiles left over."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    program = tl.program_id(0)
    first_row = program * TILE_ROWS
    total = first_row * 0
    num_before = first_row * 0
    for first in range(0, num_rows, CHUNK):
        every = first + tl.arange(0, CHUNK)
        _, is_start = _starts(row_slot, every, num_rows, TILE_ROWS)
        total += tl.sum(is_start.to(tl.int32))
        num_before += tl.sum((is_start & (every < first_row)).to(tl.int32))

    if program < tl.num_programs(0) - 1:
        offset = tl.arange(0, TILE_ROWS)
        row = first_row + offset
        slot, is_start = _starts(row_slot, row, num_rows, TILE_ROWS)
        other = tl.reshape(row, (1, TILE_ROWS))
        other_slot, is_other_start = _starts(row_slot, other, num_rows, TILE_ROWS)
        is_earlier = other < row[:, None]
        rank = num_before + tl.sum((is_other_start & is_earlier).to(tl.int32), axis=1)
        size = tl.sum(((other_slot == slot[:, None]) & (is_earlier == 0)).to(tl.int32), axis=1)
        tile = tiles + (num_single + total - 1 - rank) * NUM_FIELDS
        tl.store(tile, slot, mask=is_start)
        tl.store(tile + 1, row, mask=is_start)
        tl.store(tile + 2, size, mask=is_start)
        tl.store(tile + 3, tl.load(row_position + row, mask=is_start, other=0), mask=is_start)
    else:
        for first in range(0, num_tiles, CHUNK):
            index = first + tl.arange(0, CHUNK)
            is_single = index < num_single
            row = num_rows + index
            tile = tiles + index * NUM_FIELDS
            slot = tl.load(row_slot + row, mask=is_single, other=-1)
            is_unused = (index >= num_single + total) & (index < num_tiles)
            tl.store(tile, slot, mask=is_single | is_unused)
            tl.store(tile + 1, row, mask=is_single)
            tl.store(tile + 2, row * 0 + 1, mask=is_single)
            position = tl.load(row_position + row, mask=is_single, other=0)
            tl.store(tile + 3, position, mask=is_single)


def draft_tiles(
    row_slot: Tensor, row_position: Tensor, tiles: Tensor, *, num_single: int, tile_rows: int
) -> None:
    """Tiles [num_draft_tiles, 4] of rows [N + C]: the last C = num_single rows have one each, the first N are
    chunks: runs of a slot's consecutive positions, at most C of them; slot -1 is in no tile.

    All int32; fields as of `prefill_tiles`. Raises ValueError for another shape or type.
    """
    num_rows = row_slot.shape[0] - num_single
    num_tiles = num_draft_tiles(num_rows, num_single, tile_rows)
    check_tensor("row_slot", row_slot, (num_rows + num_single,), torch.int32)
    check_tensor("row_position", row_position, (num_rows + num_single,), torch.int32)
    check_tensor("tiles", tiles, (num_tiles, TILE_FIELDS), torch.int32)
    _draft_tiles[(triton.cdiv(num_rows, tile_rows) + 1,)](
        row_slot, row_position, tiles, num_rows, num_single, num_tiles, tile_rows, CHUNK, uses_pdl(),
        num_warps=8, **launch_options(),
    )  # fmt: skip


def draft_tiles_reference(
    row_slot: Tensor, row_position: Tensor, *, num_single: int, tile_rows: int
) -> list[list[int]]:
    """The tiles in use, in order."""
    slots, positions = row_slot.tolist(), row_position.tolist()
    num_rows = len(slots) - num_single
    runs: list[list[int]] = []
    for row in range(num_rows):
        if slots[row] < 0:
            continue

        if row % tile_rows and slots[row] == slots[row - 1]:
            runs[-1][2] += 1
        else:
            runs.append([slots[row], row, 1, positions[row]])

    single = [[slots[row], row, 1, positions[row]] for row in range(num_rows, len(slots)) if slots[row] >= 0]
    return single + runs[::-1]
