"""The products of cuda_products.py from a ring of stages in shared memory, on compute capability 9.0.

A warp of each CTA copies tiles of the weight, 16 rows each, to shared memory by bulk copies, several items
ahead and across experts (ring_products.cu). So many bytes are under way that memory does not wait for the
warps that multiply. These do the same as those of expert_products.cu in the same order, and have the rows of
x in registers, which they seldom change.

Order of summation: that of cuda_products.py, with the same bits.

Grid: as many CTAs as the GPU holds at once. Each has tiles that follow each other, of one expert or a few.

Bytes: those of the experts that rows have. An expert with more than 8 rows has several tiles of pairs, which
read a band of 16 tiles of the weight one after the other: the first one from memory, the others from the L2
cache.

Dependent launch: as in cuda_products.py. The down projection copies its first items before it waits.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk._kernels.experts.expert_tiles import ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows

__all__ = ["CAPABILITY", "MAX_PAIRS", "RingTiles", "has_ring", "ring_tiles"]

MAX_PAIRS = 16
"""The most pairs of an expert, on average, for which the ring is used. The weight of an expert with more than
8 pairs is converted for each 8 anew, which takes three quarters of the time of reading it from memory. Up to
2 pairs this has been measured; from there on it follows from a count of instructions, by which the tiles of
cuda_products.py take longer."""
FEW_ROWS = 4
"""Up to so many rows, three stages are faster than four: a CTA has few items."""

CAPABILITY = (9, 0)
"""The compute capability that the ring is made for."""
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor, and what each CTA takes of it besides its own."""
MAX_INNER = 3072
"""The most inner indices for which registers hold a row of x: three chunks of each warp."""
ROW_TILE, PAIR_TILE = 16, 8
NUM_WARPS, LANES = 8, 32
COPY_ALIGNMENT = 16


class RingTiles(Struct, frozen=True):
    """Stages and CTAs of a product. No result depends on them.

    num_stages: tiles of the weight in the shared memory of a CTA. num_ctas: CTAs of a multiprocessor.
    """

    num_stages: int = 4
    num_ctas: int = 2

    @property
    def num_threads(self) -> int:
        """Threads of the warps that multiply, and of the one that copies."""
        return (NUM_WARPS + 1) * LANES

    def shared_bytes(self, inner: int) -> int:
        """Bytes of a CTA's shared memory: for each stage codes, scales, sums, an item and two barriers."""
        sums, item, barriers = NUM_WARPS * LANES * 16, 48, 16
        stage = ROW_TILE * inner // 2 + ROW_TILE * inner // 32 + sums + item + barriers
        return self.num_stages * stage + 16

    def fits(self, inner: int) -> bool:
        """Whether a multiprocessor holds `num_ctas` CTAs."""
        return self.num_ctas * (self.shared_bytes(inner) + RESERVED_BYTES) <= MULTIPROCESSOR_BYTES

    def num_items(self, rows: ExpertRows, num_weight_rows: int) -> int:
        """The most tiles of pairs times tiles of the weight, whatever the experts of the rows are."""
        num_pairs = rows.num_rows * rows.num_active
        num_used = min(rows.num_experts, num_pairs)
        return (num_used + (num_pairs - num_used) // PAIR_TILE) * (num_weight_rows // ROW_TILE)


def ring_tiles(rows: ExpertRows, matrix: ExpertMatrix) -> RingTiles | None:
    """Return the tiles for a product of rows with a matrix; None if another kernel computes it."""
    if rows.num_rows * rows.num_active > MAX_PAIRS * rows.num_experts:
        return None

    tiles = RingTiles(num_stages=3 if rows.num_rows <= FEW_ROWS else 4)
    return tiles if has_ring(matrix, tiles) else None


def has_ring(matrix: ExpertMatrix, tiles: RingTiles) -> bool:
    """Whether a product with a matrix, for which there is a product of cuda_products.py, can be computed from
    a ring: whole tiles, copies of a multiple of 16 bytes from addresses that are one, and rows that fit."""
    tensors = [tensor for tensor in (matrix.values, matrix.scales) if tensor is not None]
    is_whole = matrix.values.shape[1] % ROW_TILE == 0 and matrix.inner <= MAX_INNER
    if not is_whole or any(tensor.data_ptr() % COPY_ALIGNMENT for tensor in tensors):
        return False

    is_hopper = torch.cuda.get_device_capability(matrix.values.device) == CAPABILITY
    return is_hopper and tiles.fits(matrix.inner)
