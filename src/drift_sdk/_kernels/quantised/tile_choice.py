"""The choice of tiles for products with quantised weights, by the weight's shape and the number of rows.

What is measured best on an H200, for weights of 4,096 to 28,672 rows, follows from how many times 64 rows of
the weight, of all slices, there are for each multiprocessor: with few, several warpgroups share a slice; with
many, they share rows of x.
"""

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
        return Tiles(1, 4, rows, 3, 1) if rows <= 16 else Tiles(1, 3, rows, 2, 1)

    if num_items <= 2 * num_multiprocessors:
        if rows == 8:
            return Tiles(1, 2, rows, 3, 3)

        return Tiles(2, 2, rows, 3, 1) if rows == 16 else Tiles(2, 1, rows, 4, 1)

    return Tiles(1, 1, rows, 4, 4) if rows == 8 else Tiles(4, 1, rows, 3, 1)
