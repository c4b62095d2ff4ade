"""The choice of tiles for products with quantised weights, by the weight's shape and the number of rows."""

from __future__ import annotations

from drift_sdk._kernels.quantised.packing import PackedWeight
from drift_sdk._kernels.quantised.tiles import Tiles

__all__ = ["choose_tiles"]


def choose_tiles(weight: PackedWeight, num_rows: int, num_multiprocessors: int) -> Tiles:
    """Return the tiles for a product of `num_rows` rows on a GPU with so many multiprocessors."""
    rows = next(rows for rows in (8, 16, 32, 64) if rows >= num_rows or rows == 64)
    return Tiles(1, 2, rows, 3, 1)
