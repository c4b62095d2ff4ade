"""Tuned tables: measured launch configurations of products, by GPU and by shape of the weight.

The tables are `tuned/<gpu>.json`, written by `drift_sdk tune`, and files in the user's cache
(tuned_files.py), written by it and by tuning at a start. A weight without an entry runs with the tiles of
heuristic.py.

No table changes a product's bits: the slices of a weight are not in it, they follow from the weight's shape;
and tiles whose instruction could be another one are refused (`check_tiles`).
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib import resources

import msgspec
from msgspec import Struct

from drift_sdk._kernels.common.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.gemm.gemm import GemmConfig, GemmTiles
from drift_sdk._kernels.gemm.heuristic import ROW_COUNTS, GemmShape, default_tiles, fits
from drift_sdk._kernels.gemm.slices import num_slices

__all__ = [
    "TunedGemm",
    "TunedTable",
    "TunedTiles",
    "WatchedTable",
    "check_tiles",
    "gemm_key",
    "gpu_key",
    "heuristic_tiles",
    "shape_of_key",
    "table_for",
]

ALLOWED: dict[str, tuple[int, ...]] = {
    "tile_n": (64, 128, 256),
    "tile_m": (16, 32, 64, 128, 256),
    "tile_k": (32, 64, 128, 256),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
    "num_warps": (4, 8),
}
"""Values that tiles of a table may have. Fewer columns than 64, or warps other than whole groups of four,
would let Triton choose mma.sync instead of wgmma on compute capability 9.0, whose sums have other bits."""

MAX_ENTRIES = 64
"""Most numbers of rows of a weight."""

KEY = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})( gated)?")


def check_tiles(tiles: GemmTiles) -> None:
    """Raise ValueError for tiles that no table may hold, since their product could have other bits."""
    for name, allowed in ALLOWED.items():
        if getattr(tiles, name) not in allowed:
            found = f"{name}={getattr(tiles, name)}"
            raise ValueError(
                f"{found}: expected one of {', '.join(map(str, allowed))}: others may change bits"
            )


class TunedTiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Tiles for one weight: pairs (highest number of rows, tiles), in ascending order.

    Raises ValueError for rows in another order, and for tiles that `check_tiles` refuses.
    """

    by_rows: tuple[tuple[int, GemmTiles], ...]

    def __post_init__(self) -> None:
        counts = [max_rows for max_rows, _ in self.by_rows]
        is_ascending = counts == sorted(set(counts)) and counts[:1] > [0]
        if not (is_ascending and len(counts) <= MAX_ENTRIES):
            raise ValueError(f"by_rows: rows {counts}: expected 1 to {MAX_ENTRIES} ascending numbers over 0")

        for _, tiles in self.by_rows:
            check_tiles(tiles)

    def tiles(self, num_rows: int) -> GemmTiles:
        """Return the tiles for a number of rows: the last ones if there are more than any entry's."""
        for max_rows, tiles in self.by_rows:
            if num_rows <= max_rows:
                return tiles

        return self.by_rows[-1][1]

    def fit(self, shape: GemmShape, limits: GpuLimits) -> bool:
        """Whether all tiles fit a GPU's shared memory."""
        return all(fits(shape, tiles, limits) for _, tiles in self.by_rows)


@lru_cache(maxsize=4096)
def heuristic_tiles(shape: GemmShape, limits: GpuLimits) -> TunedTiles:
    """Return the tiles of a weight without measurements on a GPU. They have the same bits as measured
    ones."""
    return TunedTiles(tuple((num_rows, default_tiles(shape, num_rows, limits)) for num_rows in ROW_COUNTS))


class TunedGemm(Struct, frozen=True):
    """The configurations of one weight. All have the same slices, so that no bits depend on the rows' number.

    num_slices: a function of the weight's shape, see slices.py. tiles: by number of rows, as measured.
    """

    num_slices: int
    tiles: TunedTiles

    def config(self, num_rows: int) -> GemmConfig:
        """Return the configuration for a number of rows."""
        return self.tiles.tiles(num_rows).config(self.num_slices)


class TunedTable(Struct, frozen=True, kw_only=True):
    """The measurements of one kind of GPU.

    gemms: by "NxK"; by "NxK gated" for gated products, with N counting both gate and up. provenance: when and
    with which versions each entry was measured.
    """

    gemms: dict[str, TunedTiles] = {}
    provenance: dict[str, str] = {}

    def gemm(
        self,
        num_columns: int,
        inner: int,
        *,
        is_gated: bool = False,
        is_whole: bool = False,
        slices: int | None = None,
    ) -> TunedGemm:
        """Return the configurations of a weight [num_columns, inner]: those of its entry, or without one that
        fits the current GPU those of `heuristic_tiles`.

        is_whole: whether the product is to be one sum, without partial sums. A gated product always is.
        slices: of a part of a weight, which its own shape does not tell; None: `num_slices` of the shape.
        """
        shape = GemmShape(
            num_columns=num_columns,
            inner=inner,
            num_slices=slices or num_slices(num_columns, inner, is_whole=is_whole or is_gated),
            is_gated=is_gated,
            element_bytes=self._element_bytes,
        )
        limits = gpu_limits()
        entry = self.gemms.get(gemm_key(num_columns, inner, is_gated=is_gated))
        if entry is None or not entry.fit(shape, limits):
            return TunedGemm(shape.num_slices, heuristic_tiles(shape, limits))

        return TunedGemm(shape.num_slices, entry)

    @property
    def _element_bytes(self) -> int:
        return 2

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        """Report that a weight's configuration could not be used. Only a WatchedTable records it."""


class WatchedTable(TunedTable, frozen=True, kw_only=True):
    """The table of one engine, which records the weights that run as measured and those that do not.

    element_bytes: of the engine's storage type.
    used:          keys of all weights that were asked for.
    untuned:       of them, those that have no entry that fits, and those whose configurations could not be
                   used.
    """

    element_bytes: int = 2
    used: set[str] = msgspec.field(default_factory=set)
    untuned: set[str] = msgspec.field(default_factory=set)

    @property
    def _element_bytes(self) -> int:
        return self.element_bytes

    def gemm(
        self,
        num_columns: int,
        inner: int,
        *,
        is_gated: bool = False,
        is_whole: bool = False,
        slices: int | None = None,
    ) -> TunedGemm:
        found = super().gemm(num_columns, inner, is_gated=is_gated, is_whole=is_whole, slices=slices)
        key = gemm_key(num_columns, inner, is_gated=is_gated)
        self.used.add(key)
        if found.tiles is not self.gemms.get(key):
            self.untuned.add(key)
        return found

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        self.untuned.add(gemm_key(num_columns, inner, is_gated=is_gated))


def gemm_key(num_columns: int, inner: int, *, is_gated: bool = False) -> str:
    """Return a weight's key in a table."""
    return f"{num_columns}x{inner}{' gated' if is_gated else ''}"


def shape_of_key(key: str) -> tuple[int, int, bool]:
    """Return the columns, inner dimension and gating of a weight's key. Raises ValueError for no key."""
    found = KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r}: expected the shape of a weight, such as '6144x4096' or '512x64 gated'")

    return int(found[1]), int(found[2]), found[3] is not None


def gpu_key(name: str) -> str:
    """Return a GPU's key: "NVIDIA H200" -> "nvidia-h200". It names the GPU's table and folder of results."""
    return "-".join(name.lower().split())


@cache
def table_for(gpu: str) -> TunedTable:
    """Return the table of a GPU by its key; an empty table if the GPU was never measured."""
    file = resources.files("drift_sdk._kernels.gemm") / "tuned" / f"{gpu}.json"
    return msgspec.json.decode(file.read_bytes(), type=TunedTable) if file.is_file() else TunedTable()
