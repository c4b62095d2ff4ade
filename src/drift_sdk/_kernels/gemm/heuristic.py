"""Tiles of weights without measurements, derived from the weight's shape and the GPU's limits.

The rules follow what measurements on an H200 chose (`tuned/nvidia-h200.json`):

- Up to 64 rows a product is bound by the bytes of its weight. One tile takes all rows, and what counts is how
  many bytes of weights are on their way: the pipeline gets as many stages as fit beside the other CTAs of a
  multiprocessor, up to MAX_STAGES. Tiles have 128 inner indices where slices consist of them and enough
  stages fit, else 64 (`_may_be_deep`); and 128 columns instead of 64 where that leaves enough CTAs
  (`_may_be_wide`).
- From 65 rows on, several tiles of rows share the weights through the L2 cache. The tiles that need the least
  time by `cost` are taken, which counts rounds of CTAs over the multiprocessors, and slices are spread where
  few tiles would leave multiprocessors idle.
- Beyond LIBRARY_ROWS rows the vendor's library is faster for large weights, where its bits are the same.

No rule changes bits, see gemm.py.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from drift_sdk._kernels.gemm.gemm import GemmTiles
from drift_sdk._kernels.gemm.slices import slice_size
from drift_sdk._kernels.launch.gpu_limits import GpuLimits

ROW_COUNTS = (16, 32, 64, 128, 256, 2**31)
"""Highest numbers of rows that tiles are chosen for. Fewer rows than 16 run as 16: the columns of an MMA."""

MAX_STAGES, SHORT_STAGES, MANY_STAGES = 6, 4, 3
"""Most stages of the pipeline; the least that is worth it for a few tiles; and most where there are so many
CTAs that several follow each other on a multiprocessor. More did not pay on an H200."""

MOST_NEIGHBOURS, MOST_GATED_NEIGHBOURS = 2, 3
"""CTAs that share a multiprocessor for whose number stages are chosen: see `has_equal_shares`."""

SHARED_USE, SHARED_USE_OF_TWO = 0.97, 0.86
"""Shares of a multiprocessor's shared memory that the stages of its CTAs may take; the second one for more
than SHORT_STAGES stages of two CTAs, beside which there is then room for CTAs of the next kernel."""

NARROW, WIDE = 64, 128
"""Columns of a tile, or inner indices. 64 columns are the M side of wgmma, whose bits differ from those of
other instructions: tiles have no fewer."""

SHARED_RESERVE = 2048
"""Bytes of shared memory that Triton may take beside the stages: barriers, and scratch of conversions."""

ROWS_OF_MANY = 64
"""Up to this many rows, one tile takes all."""

LIBRARY_ROWS = 192
LIBRARY_ELEMENTS = 2**23
"""Rows, and elements of a weight, from which on the vendor's library is faster, about."""

MIN_CTA_SHARE, MIN_CTA_SHARE_OF_32 = 0.8, 0.5
"""Wide tiles are taken where they leave CTAs for this share of the multiprocessors; the second one for 32
rows, which let a CTA compute longer for each byte of weights."""

MOST_WIDE_ROUNDS = 10
"""Rounds of wide CTAs of few rows up to which these are faster: heads of 200,000 columns have more."""

LONG_SLICE = 19 * WIDE
"""Inner indices of a slice from which on one wide CTA a multiprocessor reads 64 rows' weights as fast as two
narrow ones: its pipeline is filled once for many bytes."""

MAX_PADDING = 0.01
"""The largest share of a slice that its last tile may be filled up with zeros."""

LEAST_STAGES_OF_MANY = 3
"""Stages for more than ROWS_OF_MANY rows, if they fit at all: one CTA with three of them takes two thirds of
the time of two CTAs with two each."""

LOAD_SPEED, LOAD_CLOCKS = 64, 2900
"""Bytes that a multiprocessor loads from the L2 cache in a clock at most; and clocks until a load has come,
which bound the speed of a CTA that is alone by the bytes that its stages have on their way."""

TILES_OF_MANY = (
    (64, 64, 64, 4), (64, 128, 128, 4), (128, 64, 64, 4), (64, 128, 64, 4), (128, 128, 64, 8),
    (128, 256, 64, 8),
)  # fmt: skip
"""Tiles for more than ROWS_OF_MANY rows: tile_n, tile_m, tile_k and warps."""


class GemmShape(Struct, frozen=True, kw_only=True):
    """The shape of a weight [num_columns, inner], and how it is multiplied.

    num_columns:   rows of the weight, gate and up together where it is gated.
    num_slices:    see slices.py.
    is_gated:      whether gate and up are one weight.
    element_bytes: of the storage type.
    """

    num_columns: int
    inner: int
    num_slices: int = 1
    is_gated: bool = False
    element_bytes: int = 2

    @property
    def num_parts(self) -> int:
        """Weight tiles that a program multiplies: gate and up, or one."""
        return 2 if self.is_gated else 1

    @property
    def slice_size(self) -> int:
        """Inner indices of a slice."""
        return slice_size(self.inner, self.num_slices)

    def num_ctas(self, tile_n: int, tile_m: int, num_rows: int, *, is_spread: bool) -> int:
        """CTAs of a product with `num_rows` rows."""
        columns = -(-self.num_columns // self.num_parts // tile_n)
        return columns * -(-num_rows // tile_m) * (self.num_slices if is_spread else 1)


def shared_bytes(shape: GemmShape, tiles: GemmTiles) -> int:
    """Return the bytes of shared memory that the stages of a product take."""
    rows = tiles.tile_n * shape.num_parts + tiles.tile_m
    return rows * tiles.tile_k * shape.element_bytes * tiles.num_stages


def fits(shape: GemmShape, tiles: GemmTiles, limits: GpuLimits) -> bool:
    """Whether a product's stages fit the shared memory that a CTA may have."""
    return shared_bytes(shape, tiles) + SHARED_RESERVE <= limits.shared_bytes


def has_equal_shares(shape: GemmShape, tiles: GemmTiles, limits: GpuLimits) -> bool:
    """Return True if a multiprocessor has room for no more of a product's CTAs than an equal share of them.

    CTAs start where those of the product before end. With room for more, the multiprocessors that become
    free first take them, and others are idle (perf/tried.md). True also where a
    multiprocessor has one CTA, or so many that some follow others.
    """
    num_ctas = shape.num_ctas(tiles.tile_n, tiles.tile_m, tiles.tile_m, is_spread=tiles.is_spread)
    share = -(-num_ctas // limits.num_multiprocessors)
    if not 1 < share <= MOST_GATED_NEIGHBOURS:
        return True

    return _num_at_once(shape, tiles, limits) <= share * limits.num_multiprocessors


def is_candidate(shape: GemmShape, tiles: GemmTiles, num_rows: int, limits: GpuLimits) -> bool:
    """Return True if tiles are worth measuring for a number of rows.

    They fit. For few rows, tiles of gate and up also have equal shares: a product measured alone does not
    show what unequal shares cost behind another one.
    """
    is_few = shape.is_gated and num_rows <= ROW_COUNTS[0]
    return fits(shape, tiles, limits) and (not is_few or has_equal_shares(shape, tiles, limits))


def default_tiles(shape: GemmShape, num_rows: int, limits: GpuLimits) -> GemmTiles:
    """Return the tiles of a weight for up to `num_rows` rows on a GPU. They fit its shared memory."""
    return (
        _tiles_of_few(shape, num_rows, limits)
        if num_rows <= ROWS_OF_MANY
        else _tiles_of_many(shape, num_rows, limits)
    )


def _tiles_of_few(shape: GemmShape, num_rows: int, limits: GpuLimits) -> GemmTiles:
    """One tile of rows; the widest tiles that keep enough CTAs and enough stages."""
    tile_m = max(16, 1 << (num_rows - 1).bit_length())
    for tile_n in (WIDE, NARROW) if _may_be_wide(shape, tile_m, num_rows, limits) else (NARROW,):
        num_ctas = shape.num_ctas(tile_n, tile_m, num_rows, is_spread=True)
        for tile_k in (WIDE, NARROW):
            num_stages = _num_stages(shape, (tile_n, tile_m, tile_k), num_ctas, limits)
            if tile_n == WIDE and tile_m == 32 and not shape.is_gated:
                num_stages = min(num_stages, SHORT_STAGES)
            least_stages = 3 if tile_m <= 32 or tile_n == WIDE else 4
            tiles = GemmTiles(True, tile_n, tile_m, tile_k, num_stages, 4)
            if tile_k == WIDE and (num_stages < least_stages or not _may_be_deep(shape, tiles, limits)):
                continue

            if num_stages >= least_stages or (tile_n, tile_k) == (NARROW, NARROW):
                return tiles

    raise AssertionError("the narrowest tiles are always returned")


def _may_be_deep(shape: GemmShape, tiles: GemmTiles, limits: GpuLimits) -> bool:
    """Return True if tiles may have 128 inner indices: slices consist of them but for little, the tile is not
    the largest one, whose stages would be few, and CTAs do not wait for others where all would run at once
    with half the stage."""
    padding = -shape.slice_size % WIDE
    if padding > MAX_PADDING * shape.slice_size or (tiles.tile_n, tiles.tile_m) == (WIDE, ROWS_OF_MANY):
        return False

    num_ctas = shape.num_ctas(tiles.tile_n, tiles.tile_m, tiles.tile_m, is_spread=True)
    half = msgspec.structs.replace(tiles, tile_k=NARROW)
    return not _num_at_once(shape, tiles, limits) < num_ctas <= _num_at_once(shape, half, limits)


def _may_be_wide(shape: GemmShape, tile_m: int, num_rows: int, limits: GpuLimits) -> bool:
    """Return True if tiles may have 128 columns. They wait for more bytes before they compute: few rows and
    long sums are worth it. Of 64 rows: long slices, where narrow tiles would leave two CTAs to some
    multiprocessors and one to the others; and weights of so many columns that CTAs follow each other anyway,
    if the last ones then fill the GPU at least as well."""
    num_ctas = shape.num_ctas(WIDE, tile_m, num_rows, is_spread=True)
    is_one_round = num_ctas <= limits.num_multiprocessors
    if tile_m == 16 or shape.is_gated and tile_m == 32:
        is_enough = num_ctas >= MIN_CTA_SHARE * limits.num_multiprocessors
        is_short = num_ctas <= MOST_WIDE_ROUNDS * limits.num_multiprocessors
        return (
            shape.slice_size >= 16 * WIDE and is_enough and (is_one_round or is_short and not shape.is_gated)
        )

    if tile_m == 32:
        is_enough = num_ctas >= MIN_CTA_SHARE_OF_32 * limits.num_multiprocessors
        return shape.slice_size >= 8 * WIDE and is_enough and is_one_round

    if shape.is_gated:
        return False

    if is_one_round:
        num_narrow = shape.num_ctas(NARROW, tile_m, num_rows, is_spread=True)
        return shape.slice_size >= LONG_SLICE and num_narrow > limits.num_multiprocessors

    if num_ctas <= 2 * limits.num_multiprocessors:
        return False

    return _last_round(shape, WIDE, tile_m, limits) >= _last_round(shape, NARROW, tile_m, limits)


def _last_round(shape: GemmShape, tile_n: int, tile_m: int, limits: GpuLimits) -> float:
    """The use of the multiprocessors by rounds of CTAs of MANY_STAGES stages: 1 if the last round fills them,
    too."""
    tiles = GemmTiles(True, tile_n, tile_m, NARROW, MANY_STAGES, 4)
    num_ctas = shape.num_ctas(tile_n, tile_m, tile_m, is_spread=True)
    num_rounds = num_ctas / _num_at_once(shape, tiles, limits)
    return num_rounds / math.ceil(num_rounds)


def _num_at_once(shape: GemmShape, tiles: GemmTiles, limits: GpuLimits) -> int:
    """CTAs whose stages fit the shared memory of all multiprocessors at a time."""
    own_bytes = shared_bytes(shape, tiles) + SHARED_RESERVE
    return limits.num_multiprocessors * max(1, limits.multiprocessor_shared_bytes // own_bytes)


def _num_stages(shape: GemmShape, tile: tuple[int, int, int], num_ctas: int, limits: GpuLimits) -> int:
    """Stages that fit beside the CTAs that share a multiprocessor: one, or two where there are more CTAs than
    multiprocessors; of gate and up, also three. At least 2, and 1 where not even these fit."""
    tile_n, tile_m, tile_k = tile
    stage_bytes = shared_bytes(shape, GemmTiles(True, tile_n, tile_m, tile_k, 1, 4))
    most_neighbours = MOST_GATED_NEIGHBOURS if shape.is_gated else MOST_NEIGHBOURS
    num_neighbours = min(-(-num_ctas // limits.num_multiprocessors), most_neighbours)
    own_bytes = limits.multiprocessor_shared_bytes // num_neighbours
    number = int(SHARED_USE * own_bytes) // stage_bytes
    if num_neighbours == 2:
        number = min(number, max(SHORT_STAGES, int(SHARED_USE_OF_TWO * own_bytes) // stage_bytes))
    most = limits.shared_bytes - SHARED_RESERVE
    num_tiles = -(-shape.slice_size // tile_k)
    is_many = num_ctas > most_neighbours * limits.num_multiprocessors
    useful = max(num_tiles // 3, min(num_tiles + 1, SHORT_STAGES))
    wanted = min(max(number, 2), MANY_STAGES if is_many else MAX_STAGES, useful)
    return max(1, min(wanted, most // stage_bytes))


def _tiles_of_many(shape: GemmShape, num_rows: int, limits: GpuLimits) -> GemmTiles:
    """The tiles of least `cost`. The slices are spread where the library may run, which does not add them."""
    is_large = shape.num_columns * shape.inner >= LIBRARY_ELEMENTS
    is_library = is_large and num_rows > LIBRARY_ROWS and shape.element_bytes == 2
    spreads = (False, True) if shape.num_slices > 1 and not is_library else (shape.num_slices > 1,)
    num_rows = min(num_rows, 4 * LIBRARY_ROWS)
    found: list[tuple[float, GemmTiles]] = []
    for is_spread in spreads:
        for tile_n, tile_m, tile_k, num_warps in TILES_OF_MANY:
            if tile_m > 2 * num_rows or shape.slice_size % tile_k and tile_k == WIDE:
                continue

            num_ctas = shape.num_ctas(tile_n, tile_m, num_rows, is_spread=is_spread)
            num_neighbours = 2 if num_ctas > limits.num_multiprocessors else 1
            own_bytes = int(SHARED_USE * limits.multiprocessor_shared_bytes) // num_neighbours
            for num_stages in (4, 3, 2, 1):
                tiles = GemmTiles(is_spread, tile_n, tile_m, tile_k, num_stages, num_warps, is_library)
                is_shared = shared_bytes(shape, tiles) <= own_bytes or num_stages <= LEAST_STAGES_OF_MANY
                if is_shared and fits(shape, tiles, limits):
                    found.append((cost(shape, tiles, num_rows, limits), tiles))
                    break

    return min(found, key=lambda one: one[0])[1]


def cost(shape: GemmShape, tiles: GemmTiles, num_rows: int, limits: GpuLimits) -> float:
    """Return an estimate of a product's time, in clocks of a multiprocessor.

    Each round of CTAs takes the longer one of its arithmetic and its loads. Of a multiprocessor: 4,096
    multiply-adds of 2 bytes a clock at best, three quarters of that in tiles that share few operands;
    LOAD_SPEED from the L2 cache, or less if too little is on its way. The partial sums are written and read
    by all multiprocessors at 12 bytes a clock each.
    """
    is_spread = tiles.is_spread
    num_ctas = shape.num_ctas(tiles.tile_n, tiles.tile_m, num_rows, is_spread=is_spread)
    num_rounds = -(-num_ctas // limits.num_multiprocessors)
    columns, inner = tiles.tile_n * shape.num_parts, shape.slice_size if is_spread else shape.inner
    is_small = columns * tiles.tile_m <= 64 * 128
    arithmetic = columns * tiles.tile_m * inner / 4096 * (4 / 3 if is_small else 1) * shape.element_bytes / 2
    staged, speed = shared_bytes(shape, tiles), float(LOAD_SPEED)
    if num_ctas <= limits.num_multiprocessors or 2 * staged > limits.multiprocessor_shared_bytes:
        on_the_way = max(staged * (tiles.num_stages - 1) / tiles.num_stages, 1)
        speed = min(speed, on_the_way / LOAD_CLOCKS)
    loads = (columns + tiles.tile_m) * inner * shape.element_bytes / speed
    # A pipeline of few stages is filled and drained in sight.
    latency = 1000.0 * (1 + 2 / tiles.num_stages)
    num_partials = shape.num_slices if is_spread else 1
    partials = 2 * 4 * num_rows * shape.num_columns * num_partials / (12 * limits.num_multiprocessors)
    return num_rounds * (max(arithmetic, loads) + latency) + (0 if shape.is_gated else partials)
