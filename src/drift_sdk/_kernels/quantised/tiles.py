"""Launch configurations of products with quantised weights. None of them changes a bit of a result."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk._kernels.quantised.packing import STEP, TILE, UNIT, PackedWeight

__all__ = ["MAX_SHARED_BYTES", "WARPGROUP_TILES", "Tiles"]

MAX_SHARED_BYTES = 232_448
"""Shared memory that a CTA may have on compute capability 9.0."""
UNIT_BYTES = {"e4m3": 1024, "int4": 512}
"""Bytes of the codes of 16 rows and 64 columns."""
WARPGROUP_TILES = 4
"""Tiles of 16 weight rows of a warpgroup."""
ALIGNMENT = 1024
"""Bytes at whose multiples a stage lies in shared memory."""


class Tiles(Struct, frozen=True):
    """Work of a CTA of multiply.cu.

    groups_along_weight: warpgroups with 64 weight rows each. num_splits: warpgroups that share the columns of
    a slice. num_rows: rows of x, 8, 16, 32 or 64. num_stages: rounds of steps in shared memory. num_ctas:
    CTAs that shall fit a multiprocessor, which limits the registers of a thread.
    """

    groups_along_weight: int
    num_splits: int
    num_rows: int
    num_stages: int
    num_ctas: int

    @property
    def num_threads(self) -> int:
        return 128 * self.groups_along_weight * self.num_splits

    def template(self) -> str:
        """The last template arguments of `multiply`."""
        return f"{self.groups_along_weight}, {self.num_splits}, {self.num_rows // 8}, {self.num_stages}"

    def shared_bytes(self, weight: PackedWeight) -> int:
        """Bytes of shared memory: the stages, and sums of the warpgroups but the first of each slice."""
        tiles = self.groups_along_weight * WARPGROUP_TILES
        step = self.num_rows * STEP * 2 + tiles * tile_bytes(weight)
        stage = -(-self.num_splits * step // ALIGNMENT) * ALIGNMENT
        sums = 2 * (self.num_splits - 1) * tiles * TILE * self.num_rows * 4
        return self.num_stages * stage + sums

    def grid(self, weight: PackedWeight, num_rows: int) -> tuple[int, int, int]:
        """CTAs along the rows, along the weight, and slices."""
        num_groups = -(-weight.num_tiles // (self.groups_along_weight * WARPGROUP_TILES))
        return -(-num_rows // self.num_rows), num_groups, weight.num_slices


def tile_bytes(weight: PackedWeight) -> int:
    """Bytes of a step of a tile in shared memory: codes, scales and zero points."""
    codes = STEP // UNIT * UNIT_BYTES[weight.code_type]
    sizes = [tensor.dtype.itemsize for tensor in (weight.scales, weight.zeros) if tensor is not None]
    return codes + STEP // weight.group_size * TILE * sum(sizes)
