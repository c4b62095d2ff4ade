"""Launch configurations of products with quantised weights. None of them changes a bit of a result."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk._kernels.quantised.packing import STEP, TILE, UNIT, PackedWeight

__all__ = ["ShareRows", "SplitSteps", "Tiles"]

UNIT_BYTES = {"e4m3": 1024, "int4": 512}
"""Bytes of the codes of 16 rows and 64 columns."""
ROWS_OF_MMA = 8
"""Rows of x that an MMA takes."""


class SplitSteps(Struct, frozen=True):
    """Few rows: the warps of a CTA share the columns of a slice, see multiply.cu.

    num_warps: of a CTA. num_tiles: tiles of 16 weight rows of a CTA. num_rows: rows of x of a CTA, 8 or 16.
    num_stages: steps copied ahead, plus one. num_ctas: CTAs that shall fit a multiprocessor. is_persistent:
    as many CTAs as fit the GPU go through all work items; else there is a CTA for each.
    """

    num_warps: int
    num_tiles: int
    num_rows: int
    num_stages: int
    num_ctas: int
    is_persistent: bool

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def template(self) -> str:
        """The function of multiply.cu and its last template arguments."""
        rows = self.num_rows // ROWS_OF_MMA
        return f"split_steps<{{}}, {self.num_warps}, {self.num_tiles}, {rows}, {self.num_stages}>"

    def shared_bytes(self, weight: PackedWeight, num_rows: int) -> int:
        """Bytes of shared memory for a product of `num_rows` rows."""
        ring = self.num_warps * self.num_stages * self.num_tiles * tile_bytes(weight)
        num_steps = -(-min(weight.slice_size, weight.inner) // STEP)
        return ring + num_steps * min(num_rows, self.num_rows) * (self.num_tiles * TILE + 4) * 4

    def grid(self, weight: PackedWeight, num_rows: int, num_multiprocessors: int) -> tuple[int, ...]:
        num_items = -(-weight.num_tiles // self.num_tiles) * weight.num_slices
        most = num_multiprocessors * self.num_ctas if self.is_persistent else num_items
        return min(num_items, most), -(-num_rows // self.num_rows)


class ShareRows(Struct, frozen=True):
    """Many rows: all warps of a CTA read the same rows of x from shared memory, see multiply.cu.

    warps_along_weight, warps_along_rows: their product is the number of warps. num_tiles: tiles of 16 weight
    rows of a warp. num_rows: rows of x of a warp, a multiple of 8. num_stages: steps copied ahead, plus one.
    num_ctas: CTAs that shall fit a multiprocessor.
    """

    warps_along_weight: int
    warps_along_rows: int
    num_tiles: int
    num_rows: int
    num_stages: int
    num_ctas: int

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_along_weight * self.warps_along_rows

    def template(self) -> str:
        """The function of multiply.cu and its last template arguments."""
        rows = self.num_rows // ROWS_OF_MMA
        warps = f"{self.warps_along_weight}, {self.warps_along_rows}"
        return f"share_rows<{{}}, {warps}, {self.num_tiles}, {rows}, {self.num_stages}>"

    def shared_bytes(self, weight: PackedWeight, num_rows: int) -> int:
        """Bytes of shared memory."""
        x_bytes = self.warps_along_rows * self.num_rows * STEP * 2
        return self.num_stages * (x_bytes + self.warps_along_weight * self.num_tiles * tile_bytes(weight))

    def grid(self, weight: PackedWeight, num_rows: int, num_multiprocessors: int) -> tuple[int, ...]:
        num_groups = -(-weight.num_tiles // (self.warps_along_weight * self.num_tiles))
        return -(-num_rows // (self.warps_along_rows * self.num_rows)), num_groups, weight.num_slices


Tiles = SplitSteps | ShareRows


def tile_bytes(weight: PackedWeight) -> int:
    """Bytes of a step of a tile in shared memory: codes, scales and zero points."""
    codes = STEP // UNIT * UNIT_BYTES[weight.code_type]
    sizes = [tensor.dtype.itemsize for tensor in (weight.scales, weight.zeros) if tensor is not None]
    return codes + STEP // weight.group_size * TILE * sum(sizes)
