"""The tiles of prefill attention: which rows of which chunk each program has, a table filled on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TILE_FIELDS", "prefill_tiles"]

TILE_FIELDS = 4
"""Numbers of a tile: slot (-1: unused tile), first row, number of rows, position of the first row."""


def prefill_tiles(chunks: Sequence[tuple[int, int, int]], tile_rows: int, out: npt.NDArray[np.int32]) -> int:
    """Cut chunks into tiles of `tile_rows` rows, the last tile of a chunk being shorter.

    chunks: (slot, start, num_rows) each, where start is the position of the first row; the rows of all chunks
    follow one another in the step.
    out: int32 [max_tiles, 4], gets the tiles, those that see the most keys first, so that no long one starts
    last; then slot -1 to the end. num_rows // tile_rows + len(chunks) tiles are always enough, num_rows being
    the rows of all chunks.
    Returns the number of tiles used. Raises ValueError if they do not fit.
    """
    slots, starts, sizes = np.array(chunks, dtype=np.int32).reshape(-1, 3).T
    tile_counts = -(-sizes // tile_rows)
    num_tiles = int(tile_counts.sum())
    if num_tiles > out.shape[0]:
        raise ValueError(f"out: room for {out.shape[0]} tiles: expected {num_tiles} or more")

    # Of every tile: its chunk, and its first row counted from that of the chunk.
    chunk = np.repeat(np.arange(len(tile_counts)), tile_counts)
    first_tile = np.repeat(tile_counts.cumsum() - tile_counts, tile_counts)
    row_in_chunk = (np.arange(num_tiles) - first_tile) * tile_rows
    num_rows = np.minimum(sizes[chunk] - row_in_chunk, tile_rows)
    position = starts[chunk] + row_in_chunk
    first_row = (sizes.cumsum() - sizes)[chunk] + row_in_chunk
    most_keys_first = np.argsort(-(position + num_rows), kind="stable")
    out[:num_tiles] = np.stack((slots[chunk], first_row, num_rows, position), axis=1)[most_keys_first]
    out[num_tiles:, 0] = -1
    return num_tiles
