"""The tiles of a draft's prefill attention, made on the device.

`prefill_tiles` makes the same kind of table on the host. A tile is a run of one slot's rows that a program of
the attention owns. It ends with its slot's rows, and where the row's index is a multiple of the tile's size.
The tiles of chunks stand in falling order of their rows: of a long chunk, those that see most keys come
first. Before them stand tiles of one row each, of the single rows; behind them unused tiles, of slot -1.

Grid (ceil(N / TILE_ROWS) + 1,): program p owns the tiles that start in rows p * TILE_ROWS on; the last
program owns the single rows' tiles and the unused ones. Every program counts the tiles of all N rows, to know
where its own stand: 8 bytes a row, from L2. All values are integers, so no order of summation matters.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.prefill import TILE_FIELDS
from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv

__all__ = ["draft_tiles", "num_draft_tiles"]

CHUNK_ROWS = 1024
"""Rows, or tiles of single rows, that a program reads at a time: 4 a thread of 8 warps."""
NUM_FIELDS = tl.constexpr(TILE_FIELDS)


def num_draft_tiles(num_rows: int, num_chunks: int, tile_rows: int) -> int:
    """The number of tiles to make room for: those of num_rows rows in at most num_chunks chunks, each of
    which may add one that is not full, and of as many single rows."""
    return -(-num_rows // tile_rows) + 2 * num_chunks


@device_function
def _find_starts(
    row_slot_ptr,  # [N + C] int32
    row,  # indices of rows
    num_rows,  # N
    TILE_ROWS: tl.constexpr,
):
    """(slots of these rows, whether each row starts a tile)."""
    slot = tl.load(row_slot_ptr + row, mask=row < num_rows, other=-1)
    before = tl.load(row_slot_ptr + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
    return slot, (slot >= 0) & ((slot != before) | (row % TILE_ROWS == 0))


@kernel
def _draft_tiles(
    row_slot_ptr,  # [N + C] int32
    row_position_ptr,  # [N + C] int32
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32, written
    num_rows,  # N
    num_single,  # C
    num_tiles,
    TILE_ROWS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(N / TILE_ROWS) + 1,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    program = tl.program_id(0)
    first_row = program * TILE_ROWS
    # Tiles of all rows, and of the rows before this program's; zeros as tensors, changed in the loop.
    num_used = first_row * 0
    num_before = first_row * 0
    for first in range(0, num_rows, CHUNK_ROWS):
        row = first + tl.arange(0, CHUNK_ROWS)
        _, is_start = _find_starts(row_slot_ptr, row, num_rows, TILE_ROWS)
        num_used += tl.sum(is_start.to(tl.int32))
        num_before += tl.sum((is_start & (row < first_row)).to(tl.int32))

    if program < tl.num_programs(0) - 1:
        row = first_row + tl.arange(0, TILE_ROWS)
        slot, is_start = _find_starts(row_slot_ptr, row, num_rows, TILE_ROWS)
        other = tl.reshape(row, (1, TILE_ROWS))
        other_slot, is_other_start = _find_starts(row_slot_ptr, other, num_rows, TILE_ROWS)
        is_earlier = other < row[:, None]
        rank = num_before + tl.sum((is_other_start & is_earlier).to(tl.int32), axis=1)
        size = tl.sum(((other_slot == slot[:, None]) & (is_earlier == 0)).to(tl.int32), axis=1)
        tile_ptr = tiles_ptr + (num_single + num_used - 1 - rank) * NUM_FIELDS
        tl.store(tile_ptr, slot, mask=is_start)
        tl.store(tile_ptr + 1, row, mask=is_start)
        tl.store(tile_ptr + 2, size, mask=is_start)
        tl.store(tile_ptr + 3, tl.load(row_position_ptr + row, mask=is_start, other=0), mask=is_start)
    else:
        for first in range(0, num_tiles, CHUNK_ROWS):
            tile = first + tl.arange(0, CHUNK_ROWS)
            is_single = tile < num_single
            row = num_rows + tile
            tile_ptr = tiles_ptr + tile * NUM_FIELDS
            slot = tl.load(row_slot_ptr + row, mask=is_single, other=-1)
            is_unused = (tile >= num_single + num_used) & (tile < num_tiles)
            tl.store(tile_ptr, slot, mask=is_single | is_unused)
            tl.store(tile_ptr + 1, row, mask=is_single)
            tl.store(tile_ptr + 2, row * 0 + 1, mask=is_single)
            position = tl.load(row_position_ptr + row, mask=is_single, other=0)
            tl.store(tile_ptr + 3, position, mask=is_single)


def draft_tiles(
    row_slot: Tensor, row_position: Tensor, tiles: Tensor, *, num_single: int, tile_rows: int
) -> None:
    """Write the tiles of rows [N + C] to tiles [num_draft_tiles, TILE_FIELDS].

    The first N rows are chunks, runs of a slot's consecutive positions, at most C of them; rows of slot -1
    are in no tile. The last C = num_single rows have a tile each, of slot -1 if the row has none. tile_rows:
    rows of a tile, a power of two. Fields as of `prefill_tiles`: slot, first row, number of rows, position of
    the first row; other fields of unused tiles are not written. All int32.

    Raises ValueError for another shape or type.
    """
    num_rows = row_slot.shape[0] - num_single
    num_tiles = num_draft_tiles(num_rows, num_single, tile_rows)
    check_tensor("row_slot", row_slot, (num_rows + num_single,), torch.int32)
    check_tensor("row_position", row_position, (num_rows + num_single,), torch.int32)
    check_tensor("tiles", tiles, (num_tiles, TILE_FIELDS), torch.int32)
    _draft_tiles[(cdiv(num_rows, tile_rows) + 1,)](
        row_slot,
        row_position,
        tiles,
        num_rows,
        num_single,
        num_tiles,
        TILE_ROWS=tile_rows,
        CHUNK_ROWS=CHUNK_ROWS,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )
