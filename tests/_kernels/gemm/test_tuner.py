"""Tuning takes the fastest candidate among those that have the same bits, within its time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from slow_cases import slow_after
from torch import Tensor

from drift_sdk._kernels.gemm import tuner
from drift_sdk._kernels.gemm.gemm import GemmConfig, GemmTiles
from drift_sdk._kernels.gemm.heuristic import ROW_COUNTS, GemmShape, default_tiles, has_equal_shares
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.gemm.tuner import KNOWN, SHORT, Effort, WeightToTune, tune
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles
from drift_sdk._kernels.launch.gpu_limits import HOPPER

pytestmark = pytest.mark.interpreter

QUICK = Effort(name="quick", row_counts=(1, 128), all_candidates=False, num_timings=1)


def weight(num_columns: int, inner: int, *, is_gated: bool = False, number: int = 2) -> WeightToTune:
    generator = torch.Generator().manual_seed(num_columns)
    shape = GemmShape(
        num_columns=num_columns,
        inner=inner,
        num_slices=num_slices(num_columns, inner, is_whole=is_gated),
        is_gated=is_gated,
    )
    tensors = [torch.randn(num_columns, inner, generator=generator).bfloat16() for _ in range(number)]
    return WeightToTune(shape=shape, tensors=tensors)


class Clock:
    """Times of candidates in the order in which they are timed: each is faster than the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timed: list[GemmConfig] = []
        self._now = 0.0
        run = tuner._run

        def recorded(shape: GemmShape, config: GemmConfig, x: Tensor, one: Tensor, out: Tensor) -> None:
            self.latest = config
            run(shape, config, x, one, out)

        def time_us(step: Callable[[], None], num_calls: int, *, num_timings: int) -> float:
            self.timed.append(self.latest)
            self._now += 1.0
            return 0.25 ** len(self.timed)

        monkeypatch.setattr(tuner, "_run", recorded)
        monkeypatch.setattr(tuner, "time_us", time_us)
        monkeypatch.setattr(tuner.time, "monotonic", lambda: self._now)


@pytest.mark.parametrize("is_gated", [False, True])
def test_fastest_candidate_is_taken_and_others_keep_the_heuristic(
    is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, one = Clock(monkeypatch), weight(128, 128, is_gated=is_gated)
    fractions: list[float] = []
    table = tune([one], QUICK, on_progress=fractions.append)
    entry = table.gemms[one.key]
    assert [rows for rows, _ in entry.by_rows] == sorted({1, 128, *ROW_COUNTS})
    for rows, tiles in entry.by_rows:
        if rows in QUICK.row_counts:
            timed = [config for config in clock.timed if (config.tile_m == 16) == (rows == 1)]
            assert tiles == tuner.tiles_of(timed[-1])
        else:
            assert tiles == default_tiles(one.shape, rows, HOPPER)
    assert "quick" in table.provenance[one.key]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_tiles_of_a_similar_gpu_are_the_only_candidates_beside_the_heuristic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, one = Clock(monkeypatch), weight(128, 128)
    first = default_tiles(one.shape, 1, HOPPER)
    tiles = msgspec.structs.replace(first, num_stages=first.num_stages + 1)
    known = TunedTable(gemms={one.key: TunedTiles(((1, tiles), (128, tiles)))})
    effort = msgspec.structs.replace(KNOWN, row_counts=(1,), num_timings=1)
    table = tune([one], effort, known=known)
    assert [tuner.tiles_of(config) for config in clock.timed] == [first, tiles]
    assert table.gemms[one.key].by_rows == ((1, tiles),)
    assert KNOWN.name in table.provenance[one.key]


def test_candidates_for_gate_and_up_of_few_rows_have_equal_shares() -> None:
    shape = GemmShape(num_columns=37_888, inner=3584, is_gated=True)
    found = [tuner.tiles_of(each) for each in tuner.candidates(shape, 1, HOPPER, all_candidates=True)]
    assert len(found) > 4 and all(has_equal_shares(shape, tiles, HOPPER) for tiles in found)
    assert GemmTiles(True, 64, 16, 64, 4, 4) in found and GemmTiles(True, 64, 16, 64, 3, 4) not in found


def test_candidate_with_other_bits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are compared with those of the heuristic's tiles; the slightest difference counts."""
    clock, one = Clock(monkeypatch), weight(64, 256)
    run = tuner._run

    def wrong(shape: GemmShape, config: GemmConfig, x: Tensor, tensor: Tensor, out: Tensor) -> None:
        run(shape, config, x, tensor, out)
        if config.num_stages == 6:
            out[0, 0, 0] = torch.nextafter(out[0, 0, 0], torch.tensor(torch.inf))

    monkeypatch.setattr(tuner, "_run", wrong)
    tune([one], QUICK)
    stages = {config.num_stages for config in clock.timed}
    first = default_tiles(one.shape, 1, HOPPER).num_stages
    assert first != 6 and first in stages and 6 not in stages and len(stages) > 1


@pytest.mark.parametrize("way", slow_after(1, [None, "batch", "slices"]))
def test_library_is_measured_in_the_way_in_which_it_serves(
    way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken where it is faster, for rows from MIN_LIBRARY_ROWS on, and left where its bits differ."""
    Clock(monkeypatch)
    ways: list[str] = []

    def library(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, one: str) -> None:
        ways.append(one)

    monkeypatch.setattr(tuner, "library_way", lambda *arguments: way)
    monkeypatch.setattr(tuner, "library_multiply", library)
    clock = tuner.time_us

    def time_us(step: Callable[[], None], num_calls: int, *, num_timings: int) -> float:
        step()
        return clock(step, num_calls, num_timings=num_timings)

    monkeypatch.setattr(tuner, "time_us", time_us)
    one = weight(128, 256)
    known = TunedTable(gemms={one.key: TunedTiles(((1, default_tiles(one.shape, 1, HOPPER)),))})
    effort = msgspec.structs.replace(KNOWN, row_counts=(64, 128), num_timings=1)
    table = tune([one], effort, known=known)
    assert set(ways) == ({way} if way else set())
    found = {rows: tiles.is_library for rows, tiles in table.gemms[one.key].by_rows}
    assert found == {64: False, 128: way is not None}


def test_tuning_ends_with_its_time_and_takes_large_weights_first(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    small, large = weight(64, 128), weight(192, 128)
    few = list(tuner.candidates(large.shape, 1, HOPPER, all_candidates=False))
    effort = Effort(
        name="quick", row_counts=(1,), all_candidates=False, num_timings=1, seconds=len(few) - 0.5
    )
    table = tune([small, large], effort)
    assert set(table.gemms) == {large.key}


def test_short_tuning_compiles_few_kernels_where_there_are_few_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [weight(64 * index, 128, number=1) for index in (1, 2, 3)]
    compiled: list[int] = []

    def compile_trials(trials: list[tuner.Trial], *_: object) -> None:
        compiled.append(len(trials))
        trials.clear()

    monkeypatch.setattr(tuner, "_compile", compile_trials)
    Clock(monkeypatch)
    tune(weights, SHORT, num_processes=2)
    assert SHORT.kernels_per_cpu is not None and compiled == [2 * SHORT.kernels_per_cpu]


def test_chain_reads_several_times_the_cache() -> None:
    """Weights of a model that has few of a shape are repeated, up to a number of products."""
    one = weight(64, 128, number=3)
    assert len(one.chain(HOPPER)) == tuner.MAX_CHAIN
    assert [tensor is one.tensors[index % 3] for index, tensor in enumerate(one.chain(HOPPER))] == [True] * 64
