"""Measurement of the fastest tiles for weights on the current GPU.

Each candidate's product of random rows must have the bits of the tiles that heuristic.py gives, which are
compared with float32 in tests; one with other bits is left out. Candidates are timed in a captured chain of
products over enough different weights that none is found in the cache.

Efforts: FULL tries all candidates for all numbers of rows, in minutes. SHORT tries the neighbours of the
heuristic's choice for a few numbers of rows, those of the fewest rows and the largest weights first, until
its time is over. With the table of a similar GPU, its tiles are compared with the heuristic's choice alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any

import msgspec
import torch
import triton
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.gemm import (
    GemmConfig,
    GemmTiles,
    gated_multiply,
    library_gated_multiply,
    library_multiply,
    library_way,
    multiply,
)
from drift_sdk._kernels.gemm.heuristic import (
    ROW_COUNTS,
    TILES_OF_MANY,
    GemmShape,
    default_tiles,
    is_candidate,
)
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, check_tiles, gemm_key
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.launch.kernel import is_interpreted
from drift_sdk._kernels.launch.parallel_compile import (
    available_cpus,
    compile_kernels,
    missing_kernels,
    recorded_kernels,
)


def time_us(step: Callable[[], None], num_calls: int, *, num_timings: int = 5) -> float:
    """Return the microseconds of one of the `num_calls` calls in `step`, which is captured in a CUDA graph.

    The median of `num_timings` measurements of four replays each, after as many that warm up. Nothing waits
    for more of the GPU than the stream of the measurements, and other threads may call CUDA meanwhile.
    """
    with _timing_stream() as stream:
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        times: list[float] = []
        for _ in range(2 * num_timings):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / 4 / num_calls)

    return sorted(times[num_timings:])[num_timings // 2]


@contextmanager
def _timing_stream() -> Iterator[torch.cuda.Stream]:
    """Work of a `with` block goes to the stream of measurements, after that of the current stream."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream


@cache
def _stream(index: int) -> Any:
    """The stream of measurements on a GPU. Libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(index)


MIN_LIBRARY_ROWS = 128
"""Row counts from this one on are also measured with the vendor's library, with full effort."""

VARIED = ("is_spread", "tile_n", "tile_m", "tile_k", "num_stages")
"""Fields of which neighbours of the heuristic's choice change one, the stages by one."""

LONG_STAGES = (3, 4, 5, 6)
MANY_STAGES = (2, 3, 4)

WORKING_SETS = 6
"""A chain of products reads so many times the bytes of the L2 cache."""
MAX_CHAIN = 64
"""Most products of a chain."""

Measured = tuple[float, GemmConfig]
"""Microseconds a product, and its configuration."""


class Effort(Struct, frozen=True, kw_only=True):
    """Extent of the measurements.

    name: in the provenance of entries. row_counts: numbers of rows that are measured, the most important
    first. all_candidates: whether to try more than the neighbours of the heuristic's choice. num_timings:
    of a candidate, of which the median counts. seconds: after which nothing more is measured; None: no
    limit.
    kernels_per_cpu: most kernels that are compiled for each CPU; None: no limit.
    """

    name: str
    row_counts: tuple[int, ...]
    all_candidates: bool
    num_timings: int
    seconds: float | None = None
    kernels_per_cpu: int | None = None


FULL = Effort(
    name="full",
    row_counts=(1, 4, 16, 32, 64, 128, 256, 384),
    all_candidates=True,
    num_timings=5,
)
KNOWN = msgspec.structs.replace(FULL, name="tiles of another GPU")
SHORT = Effort(
    name="short",
    row_counts=(16, 64),
    all_candidates=False,
    num_timings=3,
    seconds=10.0,
    kernels_per_cpu=4,
)
"""Of other numbers of rows, in the mean of the shapes in the shipped table, the heuristic's choice is about
as good as the measured one."""


class WeightToTune(Struct, frozen=True, kw_only=True):
    """A weight's shape, and tensors of that shape [num_columns, inner] on the GPU, with different
    contents."""

    shape: GemmShape
    tensors: list[Tensor]

    @property
    def key(self) -> str:
        return gemm_key(self.shape.num_columns, self.shape.inner, is_gated=self.shape.is_gated)

    def chain(self, limits: GpuLimits) -> list[Tensor]:
        """The tensors to multiply in turn: several times the L2 cache, in repeats if there are too few."""
        size = self.tensors[0].nbytes
        number = min(MAX_CHAIN, max(2, -(-WORKING_SETS * limits.l2_bytes // size)))
        return list(itertools.islice(itertools.cycle(self.tensors), number))


class Trial(Struct, frozen=True):
    """A candidate for a weight and a number of rows."""

    weight: WeightToTune
    num_rows: int
    config: GemmConfig


def random_weight(shape: GemmShape, number: int) -> WeightToTune:
    """Return a weight with `number` random tensors; products have a standard deviation of 1."""
    dtype = torch.bfloat16
    tensors = [
        torch.randn(shape.num_columns, shape.inner, device="cuda", dtype=dtype).mul_(shape.inner**-0.5)
        for _ in range(number)
    ]
    return WeightToTune(shape=shape, tensors=tensors)


def candidates(
    shape: GemmShape,
    num_rows: int,
    limits: GpuLimits,
    all_candidates: bool = True,
    known: TunedTiles | None = None,
) -> Iterator[GemmConfig]:
    """Yield the configurations to try for a weight and a number of rows, each once, the heuristic's first.

    They are those of `is_candidate`, and `check_tiles` allows them. all_candidates: see `Effort`. known:
    tiles of the weight on another GPU, which are the only others then.
    """
    first = msgspec.structs.replace(default_tiles(shape, num_rows, limits), is_library=False)
    if known is not None:
        others: Iterable[GemmTiles] = [msgspec.structs.replace(known.tiles(num_rows), is_library=False)]
    else:
        others = _tiles_for_few(num_rows) if num_rows <= 64 else _tiles_for_many(shape)
    for tiles in dict.fromkeys((first, *others)):
        num_changes = sum(getattr(tiles, name) != getattr(first, name) for name in VARIED)
        is_near = num_changes <= 1 and abs(tiles.num_stages - first.num_stages) <= 1
        is_usable = tiles == first or is_candidate(shape, tiles, num_rows, limits)
        if is_usable and (all_candidates or is_near):
            check_tiles(tiles)
            yield tiles.config(shape.num_slices)


def tiles_of(config: GemmConfig) -> GemmTiles:
    """Return a configuration without its slices, as a table holds it."""
    return GemmTiles(*(getattr(config, name) for name in GemmTiles.__struct_fields__))


def _tiles_for_few(num_rows: int) -> Iterable[GemmTiles]:
    tile_m = max(16, 1 << (num_rows - 1).bit_length())
    for tile_n, tile_k, num_stages in itertools.product((64, 128), (64, 128), LONG_STAGES):
        yield GemmTiles(True, tile_n, tile_m, tile_k, num_stages, 4)


def _tiles_for_many(shape: GemmShape) -> Iterable[GemmTiles]:
    # Few tiles leave multiprocessors idle: slices spread over CTAs are then worth their partial sums.
    for is_spread in (False, True) if shape.num_slices > 1 else (False,):
        for tiles, num_stages in itertools.product(TILES_OF_MANY, MANY_STAGES):
            tile_n, tile_m, tile_k, num_warps = tiles
            yield GemmTiles(is_spread, tile_n, tile_m, tile_k, num_stages, num_warps)


def tune(
    weights: Sequence[WeightToTune],
    effort: Effort,
    *,
    known: TunedTable | None = None,
    num_processes: int | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> TunedTable:
    """Return measured tiles of the weights, with their provenance.

    known: the table of a similar GPU; only its tiles of a weight that it has and the heuristic's are tried.
    num_processes: that compile candidates; None: as `compile_kernels` chooses. on_progress: called with the
    fraction that is done, of compiling and then of measuring.
    """
    limits = gpu_limits()
    trials = _trials(weights, effort, limits, {} if known is None else known.gemms)
    cpus = num_processes or available_cpus()
    if effort.kernels_per_cpu is not None:
        trials = trials[: effort.kernels_per_cpu * cpus]
    _compile(trials, num_processes, lambda fraction: on_progress(fraction / 2))
    began_at = time.monotonic()
    best: dict[tuple[str, int], Measured] = {}
    chains: dict[str, list[Tensor]] = {weight.key: weight.chain(limits) for weight in weights}
    for index, ((key, num_rows), group) in enumerate(groups := _grouped(trials)):
        on_progress((1 + index / len(groups)) / 2)
        if effort.seconds is not None and time.monotonic() - began_at > effort.seconds:
            break

        found = _fastest(group, chains[key], effort)
        if found is not None and effort.all_candidates and num_rows >= MIN_LIBRARY_ROWS:
            found = _faster_by_library(group[0].weight.shape, num_rows, chains[key], found, effort)
        if found is not None:
            best[key, num_rows] = found
    on_progress(1.0)
    return _table(weights, best, effort, limits)


def _trials(
    weights: Sequence[WeightToTune], effort: Effort, limits: GpuLimits, known: Mapping[str, TunedTiles]
) -> list[Trial]:
    """All candidates in the order in which they are measured: by number of rows, then by the weights'
    bytes."""
    largest_first = sorted(weights, key=lambda weight: -weight.tensors[0].nbytes * len(weight.tensors))
    return [
        Trial(weight, num_rows, config)
        for num_rows in effort.row_counts
        for weight in largest_first
        for config in candidates(weight.shape, num_rows, limits, effort.all_candidates, known.get(weight.key))
    ]


def _grouped(trials: Sequence[Trial]) -> list[tuple[tuple[str, int], list[Trial]]]:
    """The trials of each weight and number of rows, in order."""
    groups: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.weight.key, trial.num_rows), []).append(trial)
    return list(groups.items())


def _compile(
    trials: Sequence[Trial], num_processes: int | None, on_progress: Callable[[float], None]
) -> None:
    """Compile the candidates that are not in Triton's cache."""
    if is_interpreted():
        return

    with recorded_kernels() as kernels:
        for trial in trials:
            weight, rows = trial.weight.tensors[0], trial.config.tile_m
            x = torch.empty(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
            _run(trial.weight.shape, trial.config, x, weight, _output(trial.weight.shape, trial.config, x))
    compile_kernels(missing_kernels(kernels), num_processes=num_processes, on_progress=on_progress)


def _run(shape: GemmShape, config: GemmConfig, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [M, inner] by a weight of the given shape, with the kernels of gemm.py."""
    if shape.is_gated:
        gated_multiply(x, weight, out, config)
    else:
        multiply(x, weight, out, config)


def _output(shape: GemmShape, config: GemmConfig, x: Tensor) -> Tensor:
    """Allocate the output of a product."""
    if shape.is_gated:
        return torch.empty(len(x), shape.num_columns // 2, dtype=x.dtype, device=x.device)

    partials = (config.num_partials, len(x), shape.num_columns)
    return torch.empty(partials, dtype=torch.float32, device=x.device)


def _total(out: Tensor, shape: GemmShape) -> Tensor:
    """The product in `out`, its partial sums added in order as the kernels after it add them."""
    if shape.is_gated:
        return out

    total = out[0]
    for part in out[1:]:
        total = total + part
    return total


def _rows(weight: Tensor, num_rows: int) -> Tensor:
    """Random rows [num_rows, inner], always the same."""
    generator = torch.Generator(weight.device).manual_seed(num_rows)
    shape = (num_rows, weight.shape[1])
    return torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)


def _product(shape: GemmShape, config: GemmConfig, x: Tensor, weight: Tensor) -> Tensor | None:
    """The product of a candidate; None if it does not fit the GPU after all."""
    out = _output(shape, config, x).fill_(torch.nan)
    try:
        _run(shape, config, x, weight, out)
    except triton.runtime.errors.OutOfResources:
        return None

    return _total(out, shape)


def _fastest(group: Sequence[Trial], chain: Sequence[Tensor], effort: Effort) -> Measured | None:
    """The fastest of the candidates of a weight and a number of rows; None if none runs."""
    shape, num_rows = group[0].weight.shape, group[0].num_rows
    x = _rows(chain[0], num_rows)
    expected: Tensor | None = None
    measured: list[Measured] = []
    for trial in group:
        config = trial.config
        product = _product(shape, config, x, chain[0])
        expected = product if expected is None else expected
        # The bits are compared, not the numbers: what tuning chooses must not change any.
        if product is None or expected is None or not torch.equal(product, expected):
            continue

        out = _output(shape, config, x)

        def step(config: GemmConfig = config, out: Tensor = out) -> None:
            for weight in chain:
                _run(shape, config, x, weight, out)

        cost = time_us(step, len(chain), num_timings=effort.num_timings)
        measured.append((_with_partials(cost, shape, out, chain[0]), config))

    return min(measured, key=lambda one: one[0], default=None)


def _faster_by_library(
    shape: GemmShape, num_rows: int, chain: Sequence[Tensor], best: Measured, effort: Effort
) -> Measured:
    """The library's configuration, where it gives the same bits in less time, and `best` otherwise.

    It multiplies in the way in which it would serve. The tiles of such a configuration are those of `best`,
    for machines where the library's bits differ.
    """
    config = msgspec.structs.replace(best[1], is_spread=best[1].num_slices > 1, is_library=True)
    x = _rows(chain[0], num_rows)
    out = _output(shape, config, x)
    gate_up = torch.empty(num_rows, shape.num_columns, dtype=x.dtype, device=x.device)
    way = library_way(x, chain[0], out, config, gate_up if shape.is_gated else None)
    if way is None:
        return best

    def step() -> None:
        for weight in chain:
            if shape.is_gated:
                library_gated_multiply(x, weight, out, gate_up)
            else:
                library_multiply(x, weight, out, config, way)

    cost = time_us(step, len(chain), num_timings=effort.num_timings)
    cost = _with_partials(cost, shape, out, chain[0])
    return (cost, config) if cost < best[0] else best


def _with_partials(cost: float, shape: GemmShape, out: Tensor, weight: Tensor) -> float:
    """A product's time and that in which the next kernel reads its partial sums, as fast as the product reads
    its weight. A gated product leaves none."""
    return cost if shape.is_gated else cost * (1 + out.nbytes / weight.nbytes)


def _table(
    weights: Sequence[WeightToTune],
    best: dict[tuple[str, int], Measured],
    effort: Effort,
    limits: GpuLimits,
) -> TunedTable:
    """The table of what was measured. Numbers of rows that were not keep the heuristic's tiles."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    gemms: dict[str, TunedTiles] = {}
    provenance: dict[str, str] = {}
    for weight in weights:
        found = {rows: one for (key, rows), one in sorted(best.items()) if key == weight.key}
        if not found:
            continue

        tiles = {rows: default_tiles(weight.shape, rows, limits) for rows in ROW_COUNTS}
        if effort.all_candidates:  # the last measured one is that of all larger numbers
            tiles = {}
        tiles |= {rows: tiles_of(config) for rows, (_, config) in found.items()}
        times = ", ".join(f"{rows}: {cost:.1f}" for rows, (cost, _) in found.items())
        slices = weight.shape.num_slices
        gemms[weight.key] = TunedTiles(tuple(sorted(tiles.items())))
        provenance[weight.key] = f"{today}, {effort.name}, {slices} slices; us by rows: {times}"

    return TunedTable(gemms=gemms, provenance=provenance)
