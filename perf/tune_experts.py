"""Time the products of experts on a GPU with several tiles, to choose those of cuda_experts.py and
expert_gemm.py.

python -m perf.tune_experts --model gpt-oss-120b --rows 1 4 8 16 64
python -m perf.tune_experts --model qwen3-30b-a3b --rows 1 4 32 512

Each candidate is timed in a captured chain over different choices of experts, after its output was found to
be finite. No result depends on tiles.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from msgspec.structs import asdict, replace

from drift_sdk._kernels.experts.cuda_experts import CAPABILITY, AnyTiles, CudaTiles, RingTiles, WideTiles
from drift_sdk._kernels.experts.expert_gemm import ExpertGemmConfig, expert_gemm_config
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from perf.cases.experts import DOWN, GATE_UP, expert_cases, prepare_product
from perf.harness.bandwidth import matmul_tflop_s
from perf.harness.numbers import at_least
from perf.harness.recording import Recording, free_memory, parser
from perf.harness.shapes import Model, prepare
from perf.harness.table import show
from perf.kernel_speed import KernelRun, measure

__all__ = ["TilesRun", "candidates", "main", "measure_tiles"]

ROW_COUNTS = (1, 4, 8, 16, 64)
FEW_TILES = ((2, 1, 2, 1), (2, 1, 1, 1), (2, 1, 2, 4), (2, 1, 3, 1), (1, 1, 3, 1), (1, 1, 4, 1), (4, 1, 1, 1))
MANY_TILES = ((2, 2, 1, 1), (2, 2, 2, 1), (4, 2, 1, 4), (4, 2, 1, 1), (2, 4, 1, 1))
MANY_ROWS = 128
"""Arguments of CudaTiles, below MANY_ROWS rows and from there on."""
RINGS = ((4, 2), (3, 2))
"""Arguments of RingTiles."""
WEIGHT_TILES = ((64, 4), (128, 4), (128, 8))
"""Rows of the weight and warps of ExpertGemmConfig: 64 rows of a warpgroup, so that the bits are the same."""
OWN = "own"

Tiles = ExpertGemmConfig | AnyTiles
Job = tuple[Model, str, int, Tiles | None]
"""A model, a product, a number of rows, and tiles; None: the engine's own."""


class TilesRun(KernelRun, kw_only=True):
    """A product with tiles. config: the tiles, or "own" for those that the engine takes for decoding."""

    config: str


def candidates(model: Model, num_rows: int) -> Iterator[Tiles | None]:
    """Yield None, for the engine's own tiles, then others: of MXFP4 experts for the program of CUDA C++, of
    others for Triton's kernels, where they fit shared memory."""
    experts = model.spec.experts
    assert experts is not None
    yield None
    if model.has_mxfp4_experts:
        yield from itertools.starmap(CudaTiles, MANY_TILES if num_rows >= MANY_ROWS else FEW_TILES)
        if gpu_limits().capability == CAPABILITY:
            yield from itertools.starmap(RingTiles, RINGS)
        if num_rows >= MANY_ROWS:
            yield WideTiles()
        return

    sizes = num_rows, experts.num_experts, experts.num_active
    rows = ExpertRows.take(lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), *sizes)
    tile_m = expert_gemm_config(rows, torch.bfloat16, is_gated=True).tile_m  # both products have the same
    for (tile_n, num_warps), tile_k, stages in itertools.product(WEIGHT_TILES, (64, 128, 256), (2, 3, 4, 6)):
        if (2 * tile_n + tile_m) * tile_k * 2 * stages < gpu_limits().shared_bytes:
            yield ExpertGemmConfig(tile_n, tile_m, tile_k, stages, num_warps)


def compile_one(job: Job) -> None:
    """Compile a candidate in a process of the pool, into the cache that all processes share.

    One that does not fit is left out.
    """
    try:
        model, kernel, num_rows, tiles = job
        prepare_product(model, kernel, num_rows, "cuda", tiles, num_routes=1).step()
    except triton.runtime.errors.OutOfResources:
        return


def measure_tiles(
    model: Model, num_rows: int, tried: Sequence[Tiles | None], bandwidth_tb_s: float, peak_tflop_s: float
) -> Iterator[TilesRun]:
    """Yield a run of both products with each of the candidates that fit the GPU."""
    cases = expert_cases(model, (num_rows,), TunedTable(), "cuda")
    for case in [case for case in cases if case.kernel in (GATE_UP, DOWN)]:
        for tiles in tried:
            prepared = partial(prepare_product, model, case.kernel, num_rows, "cuda", tiles)
            tiled = replace(case, prepare=prepared)
            try:
                run = measure(tiled, model.name, bandwidth_tb_s, peak_tflop_s, model.dtype_name or "bfloat16")
            except triton.runtime.errors.OutOfResources:
                continue

            yield TilesRun(**asdict(run), config=OWN if tiles is None else str(tiles))


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--rows", type=at_least(1), nargs="+", default=ROW_COUNTS)
    made.add_argument("--jobs", type=at_least(1), default=8, help="processes that compile candidates")
    given = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"device={given.device!r}: products are timed in CUDA graphs, expected a GPU")

    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder))
    if model.spec.experts is None:
        made.error(f"--model {given.model}: expected a model with experts")

    tried = {num_rows: list(candidates(model, num_rows)) for num_rows in given.rows}
    largest = {tiles: num_rows for num_rows, all_tiles in tried.items() for tiles in all_tiles}
    jobs: list[Job] = [
        (model, kernel, num_rows, tiles) for kernel in (GATE_UP, DOWN) for tiles, num_rows in largest.items()
    ]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        pool.map(compile_one, jobs, chunksize=1)

    recording = Recording("experts", given.device, given.out)
    peak_tflop_s = matmul_tflop_s(given.device)
    for num_rows in given.rows:
        free_memory()
        for run in measure_tiles(model, num_rows, tried[num_rows], recording.bandwidth_tb_s, peak_tflop_s):
            recording.add(run)

    fastest = sorted(recording.results.runs, key=lambda run: (run["kernel"], run["num_rows"], run["us"]))
    rows = [
        (run["kernel"], str(run["num_rows"]), f"{run['us']:.1f}", f"{run['tb_s']:.2f}", run["config"])
        for run in fastest
    ]
    show(f"{model.name} on {recording.results.gpu}", ("kernel", "rows", "us", "TB/s", "tiles"), rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
