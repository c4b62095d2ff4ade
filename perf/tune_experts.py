"""Times the products of experts on a GPU with several tiles, and writes the fastest by number of rows.

python -m perf.tune_experts --model gpt-oss-120b --rows 1 4 8 16 64 --out experts.json

Every candidate fills the output with finite numbers before it is timed, in a captured chain over different
choices of experts.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import triton
from msgspec import Struct, json

from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk._kernels.experts.cuda_products import CudaTiles
from drift_sdk._kernels.experts.expert_tiles import ExpertGemmConfig, expert_gemm_config
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk._kernels.gemm.tuner import time_us
from perf.cases.experts import DOWN, GATE_UP, prepare_product, product_bytes
from perf.harness.recording import free_memory, parser
from perf.harness.shapes import Model, prepare

__all__ = ["Timed", "candidates", "main", "tune"]

ROW_COUNTS = (1, 4, 8, 16, 64)
FEW_TILES = ((2, 1, 3, 3), (2, 1, 2, 3), (2, 1, 2, 4), (2, 1, 3, 2), (1, 1, 3, 4), (1, 1, 4, 4), (4, 1, 1, 3))
MANY_TILES = ((2, 2, 1, 4), (2, 2, 2, 3), (4, 2, 1, 3), (4, 2, 1, 2))
MANY_ROWS = 128
"""Arguments of CudaTiles, below MANY_ROWS rows and from there on."""
SHOWN = 4
"""Of each product, the fastest that are printed, before the engine's own."""

Tiles = ExpertGemmConfig | CudaTiles


class Timed(Struct, frozen=True, kw_only=True):
    """A candidate: microseconds of a product, and the bytes of its weights over them."""

    model: str
    kernel: str
    num_rows: int
    us: float
    tb_s: float
    is_default: bool
    tiles: str


def candidates(model: Model, num_rows: int, *, cuda_only: bool = False) -> Iterator[Tiles | None]:
    """Yield None, for the engine's own tiles, then others with tiles that fit shared memory and registers.

    Half of them are of the kernel of CUDA C++, the others of Triton's.
    """
    experts = model.config.experts
    assert experts is not None
    yield None
    if experts.is_quantised:
        for tiles in MANY_TILES if num_rows >= MANY_ROWS else FEW_TILES:
            yield CudaTiles(*tiles)
    if cuda_only:
        return

    sizes = num_rows, experts.num_experts, experts.num_active
    rows = ExpertRows.take(lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), *sizes)
    default = expert_gemm_config(rows, torch.bfloat16)
    inner = (64,) if experts.is_quantised else (64, 128)
    for tile_n, tile_k, stages in itertools.product((32, 64, 128), inner, (3, 4, 5)):
        config = ExpertGemmConfig(tile_n, default.tile_m, tile_k, stages, 2 if tile_n == 32 else 4)
        if (2 * tile_n + default.tile_m) * tile_k * 2 * stages < gpu_limits().shared_bytes:
            yield config


def compile_one(job: tuple[Model, str, int, Tiles | None]) -> None:
    """Compile a candidate in a process of the pool, into the cache that all processes share.

    One that does not fit is left out.
    """
    model, kernel, num_rows, config = job
    try:
        prepare_product(model, kernel, num_rows, "cuda", config, num_routes=1).step()
    except triton.runtime.errors.OutOfResources:
        return


def tune(model: Model, num_rows: int, tried: Sequence[Tiles | None]) -> Iterator[Timed]:
    """Yield the times of both products of `num_rows` rows by each candidate that fits the GPU."""
    for kernel in (GATE_UP, DOWN):
        for index, config in enumerate(tried):
            prepared = prepare_product(model, kernel, num_rows, "cuda", config)
            prepared.outputs[0].fill_(torch.nan)
            try:
                prepared.step()
            except triton.runtime.errors.OutOfResources:
                continue

            if not prepared.outputs[0].isfinite().all():
                raise RuntimeError(f"{model.name} {kernel}, {num_rows} rows, {config}: output not finite")

            us = time_us(prepared.step, prepared.num_calls)
            yield Timed(
                model=model.name,
                kernel=kernel,
                num_rows=num_rows,
                us=us,
                tb_s=product_bytes(model, kernel, num_rows) / us / 1e6,
                is_default=index == 0,
                tiles=str(config),
            )
            del prepared


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--rows", type=int, nargs="+", default=ROW_COUNTS)
    made.add_argument("--cuda-only", action="store_true", help="leave out Triton's kernels")
    made.add_argument("--jobs", type=int, default=8, help="processes that compile candidates")
    given = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"device={given.device!r}: products are timed in CUDA graphs, expected a GPU")

    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder))
    if model.config.experts is None:
        made.error(f"--model {given.model}: expected a model with experts")

    tried = {
        num_rows: list(candidates(model, num_rows, cuda_only=given.cuda_only)) for num_rows in given.rows
    }
    configs = {config: num_rows for num_rows, configs in tried.items() for config in configs}
    jobs = [
        (model, kernel, num_rows, config)
        for kernel in (GATE_UP, DOWN)
        for config, num_rows in configs.items()
    ]
    print(f"compiling {len(jobs)} candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        pool.map(compile_one, jobs, chunksize=1)

    found: list[Timed] = []
    for num_rows in given.rows:
        timed = list(tune(model, num_rows, tried[num_rows]))
        free_memory()
        found += timed
        for kernel in (GATE_UP, DOWN):
            of_kernel = [one for one in timed if one.kernel == kernel]
            fastest = sorted(of_kernel, key=lambda one: one.us)[:SHOWN]
            for one in (*fastest, of_kernel[0]):
                speed = f"{one.us:.1f} us {one.tb_s:.2f} TB/s"
                print(f"{model.name} {kernel}, {num_rows} rows: {speed} {one.tiles}", flush=True)
    if given.out is not None:
        given.out.write_bytes(json.format(json.encode(found), indent=1))


if __name__ == "__main__":
    main()
