"""Tuned tables: measured launch configurations of products, by GPU and by shape of the weight.

The tables are `tuned/<gpu>.json`, written by `drift_sdk tune`. A weight without an entry runs with UNTUNED.
No table changes a product's bits: the slices of a weight are not in it, they follow from the weight's shape.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec
from msgspec import Struct, structs

from drift_sdk._kernels.gemm.gemm import GemmConfig, GemmTiles
from drift_sdk._kernels.gemm.slices import num_slices

__all__ = ["TunedGemm", "TunedTable", "TunedTiles", "WatchedTable", "gpu_key", "table_for"]


class TunedTiles(Struct, frozen=True):
    """Tiles for one weight: pairs (highest number of rows, tiles), in ascending order."""

    by_rows: tuple[tuple[int, GemmTiles], ...]

    def tiles(self, num_rows: int) -> GemmTiles:
        """Return the tiles for a number of rows: the last ones if there are more than any entry's."""
        for max_rows, tiles in self.by_rows:
            if num_rows <= max_rows:
                return tiles

        return self.by_rows[-1][1]


UNTUNED = TunedTiles(
    (
        (16, GemmTiles(True, 64, 16, 64, 4, 4)),
        (32, GemmTiles(True, 64, 32, 64, 4, 4)),
        (64, GemmTiles(True, 64, 64, 64, 4, 4)),
        (2**31, GemmTiles(False, 128, 128, 64, 3, 8)),
    )
)
"""The tiles of a weight without measurements: a fallback with the same bits.

Up to 64 rows, one tile takes all rows and reads each weight once; beyond, tiles of 128 times 128.
The largest tiles, of a gated product, take 147,456 bytes of shared memory in a type of 2 bytes
((2 * 128 + 128) * 64 * 2 bytes, 3 stages) and 196,608 in float32, of the 232,448 that a CTA may have on
compute capability 9.0.
"""


class TunedGemm(Struct, frozen=True):
    """The configurations of one weight. All have the same slices, so that no bits depend on the rows' number.

    num_slices: a function of the weight's shape, see slices.py. tiles: by number of rows, as measured.
    """

    num_slices: int
    tiles: TunedTiles

    def config(self, num_rows: int) -> GemmConfig:
        """Return the configuration for a number of rows."""
        return GemmConfig(num_slices=self.num_slices, **structs.asdict(self.tiles.tiles(num_rows)))


class TunedTable(Struct, frozen=True, kw_only=True):
    """The measurements of one kind of GPU.

    gemms: by "NxK"; by "NxK gated" for gated products, with N counting both gate and up. provenance: when and
    with which versions each entry was measured.
    """

    gemms: dict[str, TunedTiles] = {}
    provenance: dict[str, str] = {}

    def gemm(
        self, num_columns: int, inner: int, *, is_gated: bool = False, is_whole: bool = False
    ) -> TunedGemm:
        """Return the configurations of a weight [num_columns, inner]; UNTUNED tiles if it has no entry.

        is_whole: whether the product is to be one sum, without partial sums. A gated product always is.
        """
        tiles = self.gemms.get(gemm_key(num_columns, inner, is_gated=is_gated), UNTUNED)
        return TunedGemm(num_slices(num_columns, inner, is_whole=is_whole or is_gated), tiles)

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        """Report that a weight's configuration could not be used. Only a WatchedTable records it."""

    def has_gemm(self, num_columns: int, inner: int, *, is_gated: bool = False) -> bool:
        """Whether a weight has an entry."""
        return gemm_key(num_columns, inner, is_gated=is_gated) in self.gemms


class WatchedTable(TunedTable, frozen=True, kw_only=True):
    """The table of one engine, which records weights that do not run as measured.

    untuned: keys of the weights that have no entry, and of those whose configurations could not be used.
    """

    untuned: set[str] = msgspec.field(default_factory=set)

    def gemm(
        self, num_columns: int, inner: int, *, is_gated: bool = False, is_whole: bool = False
    ) -> TunedGemm:
        found = super().gemm(num_columns, inner, is_gated=is_gated, is_whole=is_whole)
        if found.tiles is UNTUNED:
            self.refuse(num_columns, inner, is_gated=is_gated)
        return found

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        self.untuned.add(gemm_key(num_columns, inner, is_gated=is_gated))


def gemm_key(num_columns: int, inner: int, *, is_gated: bool = False) -> str:
    """Return a weight's key in a table."""
    return f"{num_columns}x{inner}{' gated' if is_gated else ''}"


def gpu_key(name: str) -> str:
    """Return a GPU's key: "NVIDIA H200" -> "nvidia-h200". It names the GPU's table and folder of results."""
    return "-".join(name.lower().split())


@cache
def table_for(gpu: str) -> TunedTable:
    """Return the table of a GPU by its key; an empty table if the GPU was never measured."""
    file = resources.files("drift_sdk._kernels.gemm") / "tuned" / f"{gpu}.json"
    return msgspec.json.decode(file.read_bytes(), type=TunedTable) if file.is_file() else TunedTable()
