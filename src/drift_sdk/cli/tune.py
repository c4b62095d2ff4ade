"""Measure which tiles and slices suit this GPU, and write the table that the kernels read.

    table=src/drift_sdk/_kernels/gemm/tuned/nvidia-h200.json
    python -m drift_sdk tune --out $table 6144x4096 28672x4096:gated

Every candidate is checked against float32 before it is timed, in a captured chain over enough different
weights that none is found in the cache. One number of slices is chosen for a weight, by the sum of its best
times over the row counts, each relative to the best of any number of slices; then the best tiles for each row
count.
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

ROW_COUNTS = (1, 4, 16, 32, 64, 128, 256, 384)
MIN_LIBRARY_ROWS = 128
SHARED_BYTES = 227 * 1024
WORKING_SET_BYTES = 300e6


class Weight(msgspec.Struct, frozen=True):
    num_columns: int
    inner: int
    is_gated: bool

    @classmethod
    def parse(cls, text: str) -> Weight:
        shape, _, kind = text.partition(":")
        num_columns, inner = map(int, shape.split("x"))
        return cls(num_columns, inner, kind == "gated")


def candidates(weight: Weight, num_rows: int) -> Iterator[GemmConfig]:
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
        # Few tiles leave multiprocessors idle: slices spread over CTAs then pay for their partial sums.
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


def output(weight: Weight, config: GemmConfig, num_rows: int) -> Tensor:
    if weight.is_gated:
        return torch.empty(num_rows, weight.num_columns // 2, dtype=torch.bfloat16, device="cuda")

    return torch.empty(config.num_partials, num_rows, weight.num_columns, device="cuda")


def make_weight(weight: Weight) -> Tensor:
    w = torch.randn(weight.num_columns, weight.inner, device="cuda", dtype=torch.bfloat16)
    return w.mul_(weight.inner**-0.5)


def compile_one(job: tuple[Weight, GemmConfig]) -> None:
    """In a process of its own: what it compiles, the cache keeps. A tile that does not fit is left out."""
    weight, config = job
    num_rows = config.tile_m
    x = torch.zeros(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
    w = torch.zeros(weight.num_columns, weight.inner, device="cuda", dtype=torch.bfloat16)
    try:
        run(weight, config, x, w, output(weight, config, num_rows))
    except triton.runtime.errors.OutOfResources:
        return


def is_right(weight: Weight, config: GemmConfig, num_rows: int, w: Tensor) -> bool:
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
    """Microseconds a call, of the calls in `step`, captured and replayed: the median of five."""
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
    num_weights = max(2, min(64, int(WORKING_SET_BYTES / (weight.num_columns * weight.inner * 2))))
    weights = [make_weight(weight) for _ in range(num_weights)]
    best: dict[tuple[int, int], tuple[float, GemmConfig]] = {}
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, weight.inner, device="cuda", dtype=torch.bfloat16)
        for config in candidates(weight, num_rows):
            if not is_right(weight, config, num_rows, weights[0]):
                continue

            out = output(weight, config, num_rows)

            def step(config: GemmConfig = config, x: Tensor = x, out: Tensor = out) -> None:
                for w in weights:
                    run(weight, config, x, w, out)

            # Whoever adds the partial sums reads them again.
            cost = time_us(step, num_weights) + (out.nbytes / 3e6 if not weight.is_gated else 0.0)
            key = (config.num_slices, num_rows)
            if key not in best or cost < best[key][0]:
                best[key] = (cost, config)

    slices = sorted({num_slices for num_slices, _ in best})
    fastest = {rows: min(best[s, rows][0] for s in slices if (s, rows) in best) for rows in ROW_COUNTS}
    chosen = min(slices, key=lambda s: sum(best[s, rows][0] / fastest[rows] for rows in ROW_COUNTS[:5]))
    for num_rows in ROW_COUNTS:
        if num_rows >= MIN_LIBRARY_ROWS:
            best[chosen, num_rows] = faster_by_library(weight, num_rows, weights, best[chosen, num_rows])
    by_rows = tuple((rows, best[chosen, rows][1]) for rows in ROW_COUNTS)
    times = ", ".join(f"{rows}: {best[chosen, rows][0]:.1f}" for rows in ROW_COUNTS)
    return TunedGemm(by_rows), f"{chosen} slices; us by rows: {times}"


def faster_by_library(
    weight: Weight, num_rows: int, weights: list[Tensor], best: tuple[float, GemmConfig]
) -> tuple[float, GemmConfig]:
    """The library instead, where it gives the same bits in less time: then the tiles are for where it does
    not."""
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

    cost = time_us(step, len(weights))
    cost += out.nbytes / 3e6 if not weight.is_gated else 0.0
    return (cost, config) if cost < best[0] else best


def tune_shapes(shapes: Sequence[str], out: Path, num_jobs: int) -> None:
    """Measure weights of these shapes and merge the outcome into the table in `out`."""
    weights = [Weight.parse(shape) for shape in shapes]
    jobs = {
        (weight, config): None
        for weight in weights
        for num_rows in ROW_COUNTS
        for config in candidates(weight, num_rows)
    }
    print(f"compiling {len(jobs)} candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        pool.map(compile_one, jobs, chunksize=8)

    name = torch.cuda.get_device_name()
    gemms, provenance = (
        {},
        {
            "gpu": name,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "versions": f"torch {torch.__version__}, triton {triton.__version__}",
            "commit": subprocess.run(
                ["git", "rev-parse", "HEAD"], capture_output=True, text=True
            ).stdout.strip(),
        },
    )
    for weight in weights:
        key = gemm_key(weight.num_columns, weight.inner, is_gated=weight.is_gated)
        gemms[key], provenance[key] = tune(weight)
        print(gpu_key(name), key, provenance[key], flush=True)

    if out.exists():  # what was measured before stays
        old = msgspec.json.decode(out.read_bytes(), type=TunedTable)
        gemms, provenance = old.gemms | gemms, old.provenance | provenance
    table = TunedTable(gemms=gemms, provenance=provenance)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
