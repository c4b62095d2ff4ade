"""Launch configurations of products with quantised weights. None of them changes a bit of a result."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk._kernels.quantised.packing import PANEL, STEP, UNIT, PackedWeight

__all__ = ["FEW_ITEMS", "MAX_SHARED_BYTES", "Tiles", "num_items", "num_splits"]

MAX_SHARED_BYTES = 232_448
"""Shared memory that a CTA may have on compute capability 9.0."""
UNIT_BYTES = {"e4m3": 4096, "int8": 4096, "int4": 2048, "e2m1": 2048}
"""Bytes of the codes of 64 rows and 64 columns."""
FEW_ITEMS = 132
"""As many items, a panel and a slice each, as an H200 has multiprocessors."""
MAX_THREADS = 1024
BARRIER_BYTES = 8
ALIGNMENT = 1024
"""Bytes at whose multiples a stage lies in shared memory."""


class Tiles(Struct, frozen=True):
    """Work of a CTA of multiply.cu.

    num_panels: panels of 64 weight rows, each with its warpgroups, 1 to 4. num_rows: rows of x, 8, 16, 32, 64
    or 128. num_stages: steps in shared memory.
    """

    num_panels: int
    num_rows: int
    num_stages: int

    def num_threads(self, weight: PackedWeight) -> int:
        """Threads of the warpgroups, and of the warps that copy."""
        return 128 * self.num_panels * num_splits(weight) + 64

    def template(self, weight: PackedWeight) -> str:
        """The last template arguments of `multiply`."""
        return f"{self.num_panels}, {num_splits(weight)}, {self.num_rows // 8}, {self.num_stages}"

    def shared_bytes(self, weight: PackedWeight) -> int:
        """Bytes of shared memory: stages with two barriers each, which totals replace at the end; at least so
        many that a multiprocessor has one CTA: with two, others would have none."""
        totals = (num_splits(weight) - 1) * self.num_panels * PANEL * self.num_rows * 4
        stages = self.num_stages * (self.stage_bytes(weight) + 2 * BARRIER_BYTES)
        return max(stages, totals, MAX_SHARED_BYTES // 2 + 1024)

    def stage_bytes(self, weight: PackedWeight) -> int:
        """Bytes of a step in shared memory: of x and of the weight."""
        step = self.num_rows * STEP * 2 + self.num_panels * panel_bytes(weight)
        return -(-step // ALIGNMENT) * ALIGNMENT

    def fits(self, weight: PackedWeight) -> bool:
        """Whether the program can be launched so for a weight."""
        splits = num_splits(weight)
        return (
            self.num_threads(weight) <= MAX_THREADS
            and self.shared_bytes(weight) <= MAX_SHARED_BYTES
            and self.num_stages > splits
            and self.num_stages % splits == 0
        )

    def grid(self, weight: PackedWeight, num_rows: int) -> tuple[int, int, int]:
        """CTAs along the rows, along the weight, and slices."""
        return -(-num_rows // self.num_rows), -(-weight.num_panels // self.num_panels), weight.num_slices


def num_splits(weight: PackedWeight) -> int:
    """Warpgroups with the same rows of the weight, which take the steps of a slice in turn.

    Part of the order of summation: a function of the weight's shape alone.
    """
    return 2 if num_items(weight) <= 2 * FEW_ITEMS else 1


def num_items(weight: PackedWeight) -> int:
    """Panels of all slices."""
    return weight.num_panels * weight.num_slices


def panel_bytes(weight: PackedWeight) -> int:
    """Bytes of a step of a panel in shared memory: codes, scales, and zero points or offsets."""
    codes = STEP // UNIT * UNIT_BYTES[weight.code_type]
    by_group = (weight.scales, weight.zeros, weight.offsets)
    sizes = [tensor.dtype.itemsize for tensor in by_group if tensor is not None]
    return codes + STEP // weight.group_size * PANEL * sum(sizes)
