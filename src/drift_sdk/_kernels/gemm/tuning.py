"""Measured launch configurations: a table for each GPU, by operation and weight shape."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec
from msgspec import Struct

from drift_sdk._kernels.gemm.gemm import GemmConfig

__all__ = ["TunedGemm", "TunedTable", "WatchedTable", "gpu_key", "table_for"]


class TunedGemm(Struct, frozen=True):
    """One weight: `by_rows` holds (most rows, configuration), ascending; all of one number of slices."""

    by_rows: tuple[tuple[int, GemmConfig], ...]

    def config(self, num_rows: int) -> GemmConfig:
        for most, config in self.by_rows:
            if num_rows <= most:
                return config

        return self.by_rows[-1][1]


UNTUNED = TunedGemm(
    (
        (16, GemmConfig(1, True, 64, 16, 64, 4, 4)),
        (32, GemmConfig(1, True, 64, 32, 64, 4, 4)),
        (64, GemmConfig(1, True, 64, 64, 64, 4, 4)),
        (2**31, GemmConfig(1, False, 128, 128, 64, 3, 8)),
    )
)
"""What a weight without measurements gets: right everywhere, fast nowhere."""


class TunedTable(Struct, frozen=True, kw_only=True):
    """What was measured on one kind of GPU.

    gemms: by "NxK", gated ones by "NxK gated" with N counting gate and up. provenance: how, when, with what.
    """

    gemms: dict[str, TunedGemm] = {}
    provenance: dict[str, str] = {}

    def gemm(self, num_columns: int, inner: int, *, is_gated: bool = False) -> TunedGemm:
        return self.gemms.get(gemm_key(num_columns, inner, is_gated=is_gated), UNTUNED)

    def whole_config(self, num_columns: int, inner: int, num_rows: int) -> GemmConfig:
        """For a product that is wanted whole, not in partial sums."""
        config = self.gemm(num_columns, inner).config(num_rows)
        return config if config.num_partials == 1 else UNTUNED.config(num_rows)

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        """Say that a weight's configuration could not be followed. Whoever watches the table notes it."""

    def has_gemm(self, num_columns: int, inner: int, *, is_gated: bool = False) -> bool:
        return gemm_key(num_columns, inner, is_gated=is_gated) in self.gemms


class WatchedTable(TunedTable, frozen=True, kw_only=True):
    """A table of one engine: `untuned` gathers the weights it was asked for in vain, and those whose
    configurations could not be followed."""

    untuned: set[str] = msgspec.field(default_factory=set)

    def gemm(self, num_columns: int, inner: int, *, is_gated: bool = False) -> TunedGemm:
        found = super().gemm(num_columns, inner, is_gated=is_gated)
        if found is UNTUNED:
            self.untuned.add(gemm_key(num_columns, inner, is_gated=is_gated))
        return found

    def whole_config(self, num_columns: int, inner: int, num_rows: int) -> GemmConfig:
        if self.gemm(num_columns, inner).config(num_rows).num_partials > 1:
            self.untuned.add(gemm_key(num_columns, inner))
        return super().whole_config(num_columns, inner, num_rows)

    def refuse(self, num_columns: int, inner: int, *, is_gated: bool = False) -> None:
        self.untuned.add(gemm_key(num_columns, inner, is_gated=is_gated))


def gemm_key(num_columns: int, inner: int, *, is_gated: bool = False) -> str:
    return f"{num_columns}x{inner}{' gated' if is_gated else ''}"


def gpu_key(name: str) -> str:
    """ "NVIDIA H200" -> "nvidia-h200", the name of its table and of its folder of results."""
    return "-".join(name.lower().split())


@cache
def table_for(gpu: str) -> TunedTable:
    """The table of a GPU by its key; an empty one if it was never measured."""
    file = resources.files("drift_sdk._kernels.gemm") / "tuned" / f"{gpu}.json"
    return msgspec.json.decode(file.read_bytes(), type=TunedTable) if file.is_file() else TunedTable()
