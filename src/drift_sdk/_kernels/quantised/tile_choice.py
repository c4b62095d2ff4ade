"""The choice of tiles for products with quantised weights, by the weight's shape and the number of rows."""

from __future__ import annotations

from drift_sdk._kernels.quantised.packing import PackedWeight
from drift_sdk._kernels.quantised.tiles import ShareRows, SplitSteps, Tiles

__all__ = ["choose_tiles"]

MAX_SPLIT_ROWS = 8


def choose_tiles(weight: PackedWeight, num_rows: int, num_multiprocessors: int) -> Tiles:
    """Return the tiles for a product of `num_rows` rows on a GPU with so many multiprocessors."""
    if num_rows <= MAX_SPLIT_ROWS:
        return SplitSteps(8, 1, 8, 4, 3, False)

    return ShareRows(4, 1, 1, 64, 3, 1)
