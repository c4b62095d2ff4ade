"""The choice of tiles for products with quantised weights, by the weight's shape and the number of rows.

A CTA has a multiprocessor to itself, and so many panels that there is one CTA for each, or 4 panels. Other
numbers of panels, more warpgroups that share a slice, and clusters whose CTAs share rows of x by multicast
were not faster on an H200.
"""

from __future__ import annotations

from drift_sdk._kernels.quantised.packing import BYTE_CODES, PackedWeight
from drift_sdk._kernels.quantised.tiles import FEW_ITEMS, MAX_SHARED_BYTES, Tiles, num_items, num_splits

__all__ = ["choose_tiles"]

ROWS = (8, 16, 32, 64)
"""Rows of x that a CTA may have."""
MANY_ROWS = 128
"""Rows of x that a CTA may have of large products, with few panels: more registers."""
BY_ROW_MANY = 256
"""With more rows of x, a CTA has MANY_ROWS of them beside a weight with codes of a byte and a scale a row,
whose sums take few registers, and three panels, or two with two warpgroups each. For the weights of
Llama-3.1-8B and 2,048 rows, these are the fastest of the tiles that were measured on an H200."""
MAX_PANELS = 4
MAX_OFFSET_WARPGROUPS = 2
"""Most warpgroups with offsets, whose sums of x take registers too, for more than FEW_ROWS rows."""
FEW_ROWS = 16
MAX_STAGES = 16


def choose_tiles(weight: PackedWeight, num_rows: int) -> Tiles:
    """Return the tiles for a product of `num_rows` rows, with as many stages as fit."""
    splits = num_splits(weight)
    rows = next((rows for rows in ROWS if rows >= num_rows), None)
    num_panels = min(-(-num_items(weight) // FEW_ITEMS), MAX_PANELS)
    if weight.offsets is not None:
        rows = rows or ROWS[-1]
        if rows > FEW_ROWS:
            num_panels = min(num_panels, MAX_OFFSET_WARPGROUPS // splits)
    if weight.row_scales is not None and weight.code_type in BYTE_CODES and num_rows > BY_ROW_MANY:
        rows, num_panels = MANY_ROWS, 4 - splits
    elif rows is None:
        # Steps of codes of a byte are so large that four stages fit beside 128 rows, two for each of two
        # warpgroups.
        has_many = splits == 1 or weight.code_type not in BYTE_CODES
        rows, num_panels = (MANY_ROWS, 2 // splits) if has_many else (ROWS[-1], 2)
    num_stages = (MAX_SHARED_BYTES - 1024) // Tiles(num_panels, rows, 1).stage_bytes(weight)
    return Tiles(num_panels, rows, min(num_stages, MAX_STAGES) // splits * splits)
