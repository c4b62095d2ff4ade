"""Which rows of which chunk a program of prefill attention has: the table it reads, filled on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TILE_FIELDS", "prefill_tiles"]

TILE_FIELDS = 4
"""Slot, first row, number of rows, position of the first row."""


def prefill_tiles(chunks: Sequence[tuple[int, int, int]], tile_rows: int, out: npt.NDArray[np.int32]) -> int:
    """Cut chunks (slot, start, num_rows), whose rows stand one after another, into tiles of `tile_rows`.

    out int32 [max_tiles, 4]: the tiles, those that see most keys first, so that no long one starts last; then
    slot -1 to the end. num_rows // tile_rows + len(chunks) tiles are always enough. Returns the number of
    tiles used; raises ValueError if they do not fit.
    """
    slots, starts, sizes = np.array(chunks, dtype=np.int32).reshape(-1, 3).T
    counts = -(-sizes // tile_rows)
    num_tiles = int(counts.sum())
    if num_tiles > out.shape[0]:
        raise ValueError(f"out: room for {out.shape[0]} tiles: expected {num_tiles} or more")

    chunk = np.repeat(np.arange(len(counts)), counts)
    offset = (np.arange(num_tiles) - np.repeat(counts.cumsum() - counts, counts)) * tile_rows
    num_rows = np.minimum(sizes[chunk] - offset, tile_rows)
    position = starts[chunk] + offset
    first_row = (sizes.cumsum() - sizes)[chunk] + offset
    heaviest = np.argsort(-(position + num_rows), kind="stable")
    out[:num_tiles] = np.stack((slots[chunk], first_row, num_rows, position), axis=1)[heaviest]
    out[num_tiles:, 0] = -1
    return num_tiles
