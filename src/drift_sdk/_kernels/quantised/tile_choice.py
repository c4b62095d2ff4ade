"""The choice of tiles for products with quantised weights, by the weight's shape and the number of rows."""

from __future__ import annotations

from drift_sdk._kernels.quantised.packing import PackedWeight
from drift_sdk._kernels.quantised.tiles import WARPGROUP_TILES, Tiles

__all__ = ["choose_tiles"]

ROWS = (8, 16, 32, 64)
"""Rows of x that a CTA may have."""


def choose_tiles(weight: PackedWeight, num_rows: int, num_multiprocessors: int) -> Tiles:
    """Return the tiles for a product of `num_rows` rows on a GPU with so many multiprocessors."""
    rows = next((rows for rows in ROWS if rows >= num_rows), ROWS[-1])
    num_items = -(-weight.num_tiles // WARPGROUP_TILES) * weight.num_slices
    if num_items <= num_multiprocessors:
        return Tiles(1, rows, 6, 1)

    return Tiles(2, rows, 3, 2) if num_items <= 2 * num_multiprocessors else Tiles(4, rows, 3, 1)
