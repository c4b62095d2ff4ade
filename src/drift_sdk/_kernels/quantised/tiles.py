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
BARRIER_BYTES = 8
ALIGNMENT = 1024
"""Bytes at whose multiples a stage lies in shared memory."""


class Tiles(Struct, frozen=True):
    """Work of a CTA of multiply.cu.

    groups_along_weight: warpgroups with 64 weight rows each, 1 to 4. num_rows: rows of x, 8, 16, 32, 64 or
    128. num_stages: steps in shared memory. num_ctas: CTAs that shall fit a multiprocessor, which limits the
    registers of a thread. cluster_size: CTAs with different weight rows and the same rows of x, of which each
    copies a share for all; the share is a multiple of 8 rows.
    """

    groups_along_weight: int
    num_rows: int
    num_stages: int
    num_ctas: int
    cluster_size: int = 1

    @property
    def num_threads(self) -> int:
        """Threads of the warpgroups, and of the warp that copies."""
        return 128 * self.groups_along_weight + 32

    def template(self) -> str:
        """The last template arguments of `multiply`."""
        return f"{self.groups_along_weight}, {self.num_rows // 8}, {self.num_stages}, {self.cluster_size}"

    def shared_bytes(self, weight: PackedWeight) -> int:
        """Bytes of shared memory: the stages, and two barriers for each."""
        tiles = self.groups_along_weight * WARPGROUP_TILES
        step = self.num_rows * STEP * 2 + tiles * tile_bytes(weight)
        stage = -(-step // ALIGNMENT) * ALIGNMENT
        return self.num_stages * (stage + 2 * BARRIER_BYTES)

    def grid(self, weight: PackedWeight, num_rows: int) -> tuple[int, int, int]:
        """CTAs along the rows, clusters along the weight, and slices."""
        cluster_tiles = self.groups_along_weight * WARPGROUP_TILES * self.cluster_size
        return -(-num_rows // self.num_rows), -(-weight.num_tiles // cluster_tiles), weight.num_slices


def tile_bytes(weight: PackedWeight) -> int:
    """Bytes of a step of a tile in shared memory: codes, scales and zero points."""
    codes = STEP // UNIT * UNIT_BYTES[weight.code_type]
    sizes = [tensor.dtype.itemsize for tensor in (weight.scales, weight.zeros) if tensor is not None]
    return codes + STEP // weight.group_size * TILE * sum(sizes)
