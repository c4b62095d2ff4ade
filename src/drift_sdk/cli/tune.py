"""The command `tune`: measures which GEMM tiles and slices suit this GPU and writes the table of kernels.

    table=src/drift_sdk/_kernels/gemm/tuned/nvidia-h200.json
    python -m drift_sdk tune --out $table 6144x4096 28672x4096:gated

Every candidate is compared with a float32 reference before it is timed. It is timed in a captured chain over
so many different weights that none is found in the L2 cache. One number of slices is chosen for a weight: the
one with the least sum, over the row counts, of its best time divided by the best time of any number of
slices. Then the fastest tile for each row count is chosen among those with that number of slices.
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
    gated_multiply,
    gated_multiply_reference,
    multiply,
    multiply_reference,
)
from drift_sdk._kernels.gemm.tuning import TunedGemm, TunedTable, gemm_key, gpu_key
from drift_sdk.errors import DriftError

__all__ = ["time_us", "tune_shapes"]

ROW_COUNTS = (1, 4, 16, 32, 64, 128, 256, 384)
NUM_DECODE_ROW_COUNTS = 5
"""The first of `ROW_COUNTS`, up to 64 rows, decide how many slices a weight has."""
MIN_LIBRARY_ROWS = 128
"""From so many rows on, cuBLAS is measured too."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a program may use, of compute capability 9.0."""
WORKING_SET_BYTES = 300e6
"""Bytes of the weights that a timed chain reads: several times the L2 cache."""
MAX_WEIGHTS = 64
BYTES_PER_US = 3e6
"""Rate at which partial sums are read again, 3 TB/s."""

Timed = tuple[float, GemmConfig]
"""Microseconds a call, and the configuration they were measured with."""


class Weight(msgspec.Struct, frozen=True):
    """Shape of a weight: num_columns output features (gate and up counted both where is_gated) by `inner`
    input features."""

    num_columns: int
    inner: int
    is_gated: bool


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
    gemms: dict[str, TunedGemm] = {}
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


def current_commit() -> str:
    """The git commit of the working directory; empty if it is in no repository, or git is not installed."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return ""

    return found.stdout.strip()


def compile_candidates(weights: Sequence[Weight], num_jobs: int) -> None:
    """Fill Triton's cache, so that timing does not wait for the compiler."""
    jobs = {
        (weight, config): None
        for weight in weights
        for num_rows in ROW_COUNTS
        for config in candidates(weight, num_rows)
    }
    print(f"compiling {len(jobs)} candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        pool.map(compile_one, jobs, chunksize=8)


def write_table(out: Path, gemms: dict[str, TunedGemm], provenance: dict[str, str]) -> None:
    if out.exists():
        old = msgspec.json.decode(out.read_bytes(), type=TunedTable)
        gemms, provenance = old.gemms | gemms, old.provenance | provenance
    table = TunedTable(gemms=gemms, provenance=provenance)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def candidates(weight: Weight, num_rows: int) -> Iterator[GemmConfig]:
    """Configurations worth timing for this many rows: those whose tiles fit into shared memory."""
    slices = (1,) if weight.is_gated or weight.num_columns > 20_000 else (1, 2, 4)
    tiles: Iterable[tuple[int, bool, int, int, int, int, int]]
    if num_rows <= 64:
        tile_m = max(16, num_rows)
        tiles = itertools.product(slices, (True,), (32, 64, 128), (tile_m,), (64, 128), (3, 4, 5, 6), (4,))
    else:
        shapes = (
            (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 3, 8), (64, 256, 64, 4, 4),
            (128, 64, 64, 4, 4), (128, 64, 64, 5, 8), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8),
            (64, 128, 128, 3, 4), (128, 256, 64, 3, 8), (256, 128, 64, 3, 8),
        )  # fmt: skip
        # Few tiles leave multiprocessors idle; then slices spread over CTAs are worth their partial sums.
        spreads = (False, True) if len(slices) > 1 else (False,)
        tiles = ((s, spread, *shape) for s in slices for spread in spreads for shape in shapes)
    for config in (GemmConfig(*tile) for tile in tiles):
        num_weight_tiles = 2 if weight.is_gated else 1
        size = (config.tile_n * num_weight_tiles + config.tile_m) * config.tile_k * 2 * config.num_stages
        if size < SHARED_BYTES and config.tile_n % 64 == 0:
            yield config


def run(weight: Weight, config: GemmConfig, x: Tensor, w: Tensor, out: Tensor) -> None:
    if weight.is_gated:
        gated_multiply(x, w, out, config)
    else:
        multiply(x, w, out, config)


def make_input(weight: Weight, num_rows: int) -> Tensor:
    """[num_rows, inner] in bfloat16."""
    return torch.randn(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)


def make_output(weight: Weight, config: GemmConfig, num_rows: int) -> Tensor:
    """[num_rows, num_columns / 2] in bfloat16 where gated, else [partial sums, num_rows, num_columns] in
    float32."""
    if weight.is_gated:
        return torch.empty(num_rows, weight.num_columns // 2, dtype=torch.bfloat16, device="cuda")

    return torch.empty(config.num_partials, num_rows, weight.num_columns, device="cuda")


def make_weight(weight: Weight) -> Tensor:
    """[num_columns, inner] in bfloat16, scaled so that products have the variance of the input."""
    w = torch.randn(weight.num_columns, weight.inner, device="cuda", dtype=torch.bfloat16)
    return w.mul_(weight.inner**-0.5)


def compile_one(job: tuple[Weight, GemmConfig]) -> None:
    """Run a candidate once in a separate process; Triton's cache keeps what that compiles. A tile that takes
    more resources than there are is skipped."""
    weight, config = job
    num_rows = config.tile_m
    x = torch.zeros(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
    w = torch.zeros(weight.num_columns, weight.inner, device="cuda", dtype=torch.bfloat16)
    try:
        run(weight, config, x, w, make_output(weight, config, num_rows))
    except triton.runtime.errors.OutOfResources:
        return


def is_right(weight: Weight, config: GemmConfig, num_rows: int, w: Tensor) -> bool:
    """Whether a candidate fits the GPU and its product is close to the float32 reference."""
    x = make_input(weight, num_rows)
    out = make_output(weight, config, num_rows).fill_(torch.nan)
    try:
        run(weight, config, x, w, out)
    except triton.runtime.errors.OutOfResources:
        return False

    if weight.is_gated:
        return torch.allclose(out, gated_multiply_reference(x, w), rtol=4e-2, atol=4e-2)

    return torch.allclose(out.sum(0), multiply_reference(x, w, config), rtol=1e-4, atol=1e-3)


def time_us(step: Callable[[], None], num_calls: int) -> float:
    """Microseconds of each of the `num_calls` calls in `step`, captured and replayed: the median of five
    measurements of four replays each, after three that are not counted."""
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


def tune(weight: Weight) -> tuple[TunedGemm, str]:
    """The configurations of one weight, and a line that says how fast they are."""
    num_weights = int(WORKING_SET_BYTES / (weight.num_columns * weight.inner * 2))
    weights = [make_weight(weight) for _ in range(max(2, min(MAX_WEIGHTS, num_weights)))]
    best = time_candidates(weight, weights)
    num_slices = choose_num_slices(best)
    chosen = {num_rows: best[num_slices, num_rows] for num_rows in ROW_COUNTS}
    for num_rows in ROW_COUNTS:
        if num_rows >= MIN_LIBRARY_ROWS:
            chosen[num_rows] = faster_by_library(weight, num_rows, weights, chosen[num_rows])

    by_rows = tuple((num_rows, config) for num_rows, (_, config) in chosen.items())
    times = ", ".join(f"{num_rows}: {cost:.1f}" for num_rows, (cost, _) in chosen.items())
    return TunedGemm(by_rows), f"{num_slices} slices; us by rows: {times}"


def time_candidates(weight: Weight, weights: list[Tensor]) -> dict[tuple[int, int], Timed]:
    """The fastest right candidate by (slices, rows)."""
    best: dict[tuple[int, int], Timed] = {}
    for num_rows in ROW_COUNTS:
        x = make_input(weight, num_rows)
        for config in candidates(weight, num_rows):
            if not is_right(weight, config, num_rows, weights[0]):
                continue

            out = make_output(weight, config, num_rows)

            def step(config: GemmConfig = config, x: Tensor = x, out: Tensor = out) -> None:
                for w in weights:
                    run(weight, config, x, w, out)

            cost = time_us(step, len(weights)) + time_to_add_us(weight, out)
            key = (config.num_slices, num_rows)
            if key not in best or cost < best[key][0]:
                best[key] = (cost, config)

    return best


def time_to_add_us(weight: Weight, out: Tensor) -> float:
    """Microseconds that the kernel which adds the partial sums takes to read them again."""
    return out.nbytes / BYTES_PER_US if not weight.is_gated else 0.0


def choose_num_slices(best: dict[tuple[int, int], Timed]) -> int:
    slices = sorted({num_slices for num_slices, _ in best})
    fastest = {rows: min(best[s, rows][0] for s in slices if (s, rows) in best) for rows in ROW_COUNTS}
    decisive = ROW_COUNTS[:NUM_DECODE_ROW_COUNTS]
    return min(slices, key=lambda s: sum(best[s, rows][0] / fastest[rows] for rows in decisive))


def faster_by_library(weight: Weight, num_rows: int, weights: list[Tensor], best: Timed) -> Timed:
    """The library instead of the kernel, if it gives the same bits in less time. The configuration's tiles
    then serve where the library gives other bits."""
    config = msgspec.structs.replace(best[1], is_spread=best[1].num_slices > 1, is_library=True)
    x = make_input(weight, num_rows)
    out, expected = (make_output(weight, config, num_rows) for _ in range(2))
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

    cost = time_us(step, len(weights)) + time_to_add_us(weight, out)
    return (cost, config) if cost < best[0] else best
