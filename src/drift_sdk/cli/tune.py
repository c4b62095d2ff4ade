"""The command `tune`: measures which GEMM tiles suit this GPU and writes the table of kernels.

    table=src/drift_sdk/_kernels/gemm/tuned/nvidia-h200.json
    python -m drift_sdk tune --out $table 6144x4096 28672x4096:gated

Every candidate is compared with float32 before it is timed, in a captured chain of products over enough
different weights that none is found in the cache. The best tiles are chosen for each row count. A weight's
slices, which its bits depend on, follow from its shape (see slices.py); tuning does not change them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import triton
from torch import Tensor

from drift_sdk._kernels.gemm.cublas_gemm import library_gated_multiply, library_multiply
from drift_sdk._kernels.gemm.gemm import (
    GemmConfig,
    GemmTiles,
    gated_multiply,
    gated_multiply_reference,
    multiply,
    multiply_reference,
)
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, gemm_key, gpu_key
from drift_sdk.errors import DriftError

__all__ = ["time_us", "tune_shapes"]

ROW_COUNTS = (1, 4, 16, 32, 64, 128, 256, 384)
"""Numbers of rows that are measured."""

MIN_LIBRARY_ROWS = 128
"""Row counts from this one on are also measured with the vendor's library."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a CTA may have on compute capability 9.0."""

WORKING_SET_BYTES = 300e6
"""Bytes of different weights in a chain: several times the 50 MB of an H200's L2 cache."""

PARTIALS_BYTES_PER_US = 3e6
"""Speed at which the kernel after a product is taken to read its partial sums: 3 TB/s."""

Measured = tuple[float, GemmConfig]
"""Microseconds a product, and its configuration."""


class Weight(msgspec.Struct, frozen=True):
    """The shape of a weight: [num_columns, inner], gate and up together where it is gated."""

    num_columns: int
    inner: int
    is_gated: bool

    @property
    def num_slices(self) -> int:
        return num_slices(self.num_columns, self.inner, is_whole=self.is_gated)


def tune_shapes(shapes: Sequence[tuple[int, int, bool]], out: Path, num_jobs: int) -> None:
    """Measure weights of these shapes on the current GPU and merge the outcome into the table in `out`.

    shapes:   (output features, input features, whether gate and up projection in one) of each weight.
    out:      JSON file; made with its folder if it does not exist. Its entries of other shapes are kept.
    num_jobs: processes that compile candidates before they are timed.
    """
    if not torch.cuda.is_available():
        raise DriftError("tune needs an NVIDIA GPU: torch finds none")

    weights = [Weight(*shape) for shape in shapes]
    compile_candidates(weights, num_jobs)
    gpu = torch.cuda.get_device_name()
    gemms: dict[str, TunedTiles] = {}
    provenance = {
        "gpu": gpu,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}",
        "commit": current_commit(),
    }
    for weight in weights:
        key = gemm_key(weight.num_columns, weight.inner, is_gated=weight.is_gated)
        gemms[key], provenance[key] = tune(weight)
        print(gpu_key(gpu), key, provenance[key], flush=True)

    write_table(out, gemms, provenance)


def candidates(weight: Weight, num_rows: int) -> Iterator[GemmConfig]:
    """Yield the configurations to try for a weight and a number of rows: those that fit shared memory.

    tile_n is 64 at least: the weights stand on the M side of wgmma, which has 64 rows.
    """
    tiles: Iterable[tuple[bool, int, int, int, int, int]]
    if num_rows <= 64:
        tile_m = max(16, num_rows)
        tiles = itertools.product((True,), (64, 128), (tile_m,), (64, 128), (3, 4, 5, 6), (4,))
    else:
        shapes = (
            (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 3, 8), (64, 256, 64, 4, 4),
            (128, 64, 64, 4, 4), (128, 64, 64, 5, 8), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8),
            (64, 128, 128, 3, 4), (128, 256, 64, 3, 8), (256, 128, 64, 3, 8),
        )  # fmt: skip
        # Few tiles leave multiprocessors idle: slices spread over CTAs are then worth their partial sums.
        spreads = (False, True) if weight.num_slices > 1 else (False,)
        tiles = ((spread, *shape) for spread in spreads for shape in shapes)
    for config in (GemmConfig(*tile, num_slices=weight.num_slices) for tile in tiles):
        num_weight_tiles = 2 if weight.is_gated else 1
        # Bytes of a stage's tiles, of 2 bytes an element, times the stages.
        size = (config.tile_n * num_weight_tiles + config.tile_m) * config.tile_k * 2 * config.num_stages
        if size < SHARED_BYTES:
            yield config


def run(weight: Weight, config: GemmConfig, x: Tensor, w: Tensor, out: Tensor) -> None:
    """Multiply x [M, inner] by w, a weight of the given shape, with the kernels of gemm.py."""
    if weight.is_gated:
        gated_multiply(x, w, out, config)
    else:
        multiply(x, w, out, config)


def output(weight: Weight, config: GemmConfig, num_rows: int) -> Tensor:
    """Allocate the output of a product."""
    if weight.is_gated:
        return torch.empty(num_rows, weight.num_columns // 2, dtype=torch.bfloat16, device="cuda")

    return torch.empty(config.num_partials, num_rows, weight.num_columns, device="cuda")


def make_weight(weight: Weight) -> Tensor:
    """Return random numbers, scaled so that products have a standard deviation of 1."""
    w = torch.randn(weight.num_columns, weight.inner, device="cuda", dtype=torch.bfloat16)
    return w.mul_(weight.inner**-0.5)


def compile_one(job: tuple[Weight, GemmConfig]) -> None:
    """Compile a candidate in a process of the pool, into the cache that all processes share.

    A tile that does not fit is left out.
    """
    weight, config = job
    num_rows = config.tile_m
    x = torch.zeros(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
    w = torch.zeros(weight.num_columns, weight.inner, device="cuda", dtype=torch.bfloat16)
    try:
        run(weight, config, x, w, output(weight, config, num_rows))
    except triton.runtime.errors.OutOfResources:
        return


def is_right(weight: Weight, config: GemmConfig, num_rows: int, w: Tensor) -> bool:
    """Whether a candidate fits the GPU, and its products of random rows are those of the reference."""
    x = torch.randn(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
    out = output(weight, config, num_rows).fill_(torch.nan)
    try:
        run(weight, config, x, w, out)
    except triton.runtime.errors.OutOfResources:
        return False

    if weight.is_gated:
        return torch.allclose(out, gated_multiply_reference(x, w), rtol=4e-2, atol=4e-2)

    return torch.allclose(out.sum(0), multiply_reference(x, w, config), rtol=1e-4, atol=1e-3)


def time_us(step: Callable[[], None], num_calls: int) -> float:
    """Return the microseconds of one of the `num_calls` calls in `step`, which is captured in a CUDA graph.

    The median of five measurements of four replays each, after three more that warm up.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 4 / num_calls)

    return sorted(times[3:])[2]


def partials_us(weight: Weight, out: Tensor) -> float:
    """Return the time in which the next kernel reads the partial sums. A gated product leaves none."""
    return 0.0 if weight.is_gated else out.nbytes / PARTIALS_BYTES_PER_US


def tune(weight: Weight) -> tuple[TunedTiles, str]:
    """Return the best tiles of a weight, and a line about the choice for the table's provenance."""
    num_weights = max(2, min(64, int(WORKING_SET_BYTES / (weight.num_columns * weight.inner * 2))))
    weights = [make_weight(weight) for _ in range(num_weights)]
    best = {num_rows: best_config(weight, num_rows, weights) for num_rows in ROW_COUNTS}
    for num_rows in ROW_COUNTS:
        if num_rows >= MIN_LIBRARY_ROWS:
            best[num_rows] = faster_by_library(weight, num_rows, weights, best[num_rows])
    times = ", ".join(f"{rows}: {time:.1f}" for rows, (time, _) in best.items())
    tiles = TunedTiles(tuple((rows, tiles_of(config)) for rows, (_, config) in best.items()))
    return tiles, f"{weight.num_slices} slices; us by rows: {times}"


def tiles_of(config: GemmConfig) -> GemmTiles:
    """Return a configuration without its slices, as a table holds it."""
    return GemmTiles(*(getattr(config, name) for name in GemmTiles.__struct_fields__))


def best_config(weight: Weight, num_rows: int, weights: list[Tensor]) -> Measured:
    """Time all candidates for a number of rows and return the fastest.

    Raises DriftError if none of them fits the GPU and multiplies correctly.
    """
    x = torch.randn(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
    measured: list[Measured] = []
    for config in candidates(weight, num_rows):
        if not is_right(weight, config, num_rows, weights[0]):
            continue

        out = output(weight, config, num_rows)

        def step(config: GemmConfig = config, out: Tensor = out) -> None:
            for w in weights:
                run(weight, config, x, w, out)

        measured.append((time_us(step, len(weights)) + partials_us(weight, out), config))
    if not measured:
        raise DriftError(f"tune: no candidate for {weight} and {num_rows} rows runs on this GPU")

    return min(measured, key=lambda one: one[0])


def faster_by_library(weight: Weight, num_rows: int, weights: list[Tensor], best: Measured) -> Measured:
    """Return the library's configuration, where it gives the same bits in less time, and `best` otherwise.

    The tiles of such a configuration are those of `best`, for machines where the library's bits differ.
    """
    config = msgspec.structs.replace(best[1], is_spread=best[1].num_slices > 1, is_library=True)
    x = torch.randn(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
    out, expected = (output(weight, config, num_rows) for _ in range(2))
    gate_up = torch.empty(num_rows, weight.num_columns, dtype=torch.bfloat16, device="cuda")

    def call(w: Tensor) -> None:
        if weight.is_gated:
            library_gated_multiply(x, w, out, gate_up)
        else:
            library_multiply(x, w, out, config)

    call(weights[0])
    run(weight, config, x, weights[0], expected)
    if not torch.equal(out, expected):
        return best

    def step() -> None:
        for w in weights:
            call(w)

    cost = time_us(step, len(weights)) + partials_us(weight, out)
    return (cost, config) if cost < best[0] else best


def compile_candidates(weights: list[Weight], num_processes: int) -> None:
    """Compile all candidates of all weights, side by side, before anything is timed."""
    jobs = {
        (weight, config): None
        for weight in weights
        for num_rows in ROW_COUNTS
        for config in candidates(weight, num_rows)
    }
    print(f"compiling {len(jobs)} candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        pool.map(compile_one, jobs, chunksize=8)


def current_commit() -> str:
    """The git commit of the working directory; empty if it is in no repository, or git is not installed."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return ""

    return found.stdout.strip()


def write_table(out: Path, gemms: dict[str, TunedTiles], provenance: dict[str, str]) -> None:
    if out.exists():
        old = msgspec.json.decode(out.read_bytes(), type=TunedTable)
        gemms, provenance = old.gemms | gemms, old.provenance | provenance
    table = TunedTable(gemms=gemms, provenance=provenance)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
