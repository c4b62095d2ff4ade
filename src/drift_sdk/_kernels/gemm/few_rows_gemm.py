"""Products of a few rows in CUDA C++, with the bits of `multiply` of gemm.py.

A warp has 16 rows of the weight and a slice of its columns. It copies them to shared memory as soon as there
is room on a multiprocessor, which is while the kernels before it still compute the rows of x. Where these are
short, memory would be idle otherwise.

Order of summation: that of gemm.py, by the same instruction: wgmma with the weights on the M side, 16 columns
at a time, in ascending order. Slices are left as partial sums.

Grid: (CTAs of a slice, slices): a CTA for each multiprocessor at most. A warp has one tile, so weights of
more tiles than there are warps are left to gemm.py, for which they occupy the GPU well.

Bytes: the weight once; x once for each CTA, from the L2 cache; the partial sums.

Dependent launch: before it waits, a program copies its weights, which never change, as far as they fit. It
permits its dependents to start when it has read x.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_range, check_tensor
from drift_sdk._kernels.common.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.common.kernel_access import KernelAccess
from drift_sdk._kernels.common.launch_order import note_kernel
from drift_sdk._kernels.gemm.gemm import GemmConfig

__all__ = [
    "MAX_ROWS",
    "ROW_TILE",
    "FewRowsTiles",
    "few_rows_multiply",
    "few_rows_tiles",
    "has_few_rows_product",
]

FILES = ("common/types.cu", "common/dependent_launch.cu", "gemm/few_rows.cu")
ACCESS = KernelAccess(frozenset({"weight"}), frozenset({"out"}), False)

TILE, CHUNK = 16, 64
"""Rows of the weight that a warp has; columns of a chunk. A warp copies STEP_CHUNKS chunks at once."""
CHUNK_BYTES, STEP_CHUNKS = TILE * CHUNK * 2, 2
GROUP_WARPS, MAX_WARPS = 4, 8
MIN_STAGES, MIN_SHARE = 3, 0.25
"""The least steps of a tile for which shared memory has room, and their least share of all: with less, too
little is copied before the rows exist."""
ROW_TILE, MAX_ROWS = 8, 4
"""Rows of x that the program has room for, and the most for which it is faster than that of gemm.py."""
SHARED_BYTES = 176 * 1024
"""Shared memory of a CTA. The rest of a multiprocessor's is left to the kernels before, which still run."""


class FewRowsTiles(Struct, frozen=True):
    """Launch configuration of a product. No bit depends on it.

    num_ctas: of a slice. num_tiles: the most tiles of a CTA, one for each warp. num_stages: steps of a tile
    in shared memory. shared_bytes: of a CTA.
    """

    num_ctas: int
    num_tiles: int
    num_stages: int
    shared_bytes: int

    @property
    def num_threads(self) -> int:
        return 32 * GROUP_WARPS * -(-self.num_tiles // GROUP_WARPS)


@lru_cache(maxsize=1024)
def few_rows_tiles(
    num_columns: int, inner: int, config: GemmConfig, limits: GpuLimits
) -> FewRowsTiles | None:
    """Return the launch configuration for a weight [num_columns, inner]; None if the kernel does not compute
    its products, or is slower than that of gemm.py."""
    if num_columns % TILE or inner % CHUNK or config.num_partials != config.num_slices:
        return None

    num_tiles, num_slices = num_columns // TILE, config.num_slices
    num_ctas = min(num_tiles, max(1, limits.num_multiprocessors // num_slices))
    most_tiles = -(-num_tiles // num_ctas)
    if most_tiles > MAX_WARPS:
        return None

    num_chunks = config.slice_size(inner) // CHUNK
    num_steps = -(-num_chunks // STEP_CHUNKS)
    # wgmma also reads the tiles of warps of the last warpgroup that have none.
    fixed = num_chunks * ROW_TILE * CHUNK * 2 + -most_tiles % GROUP_WARPS * CHUNK_BYTES
    stage_bytes = most_tiles * STEP_CHUNKS * CHUNK_BYTES
    room = (SHARED_BYTES - fixed) // stage_bytes
    if room < max(MIN_STAGES, MIN_SHARE * num_steps):
        return None

    num_stages = max(MIN_STAGES, min(room, num_steps))
    return FewRowsTiles(num_ctas, most_tiles, num_stages, fixed + num_stages * stage_bytes)


def has_few_rows_product(x: Tensor, weight: Tensor, config: GemmConfig) -> bool:
    """Return True if `few_rows_multiply` computes the product of x [M, K] and weight [N, K]."""
    num_rows = x.shape[0]
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or num_rows > MAX_ROWS:
        return False

    if few_rows_tiles(*weight.shape, config, gpu_limits()) is None:
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.common.cuda_programs import has_compiler

    return torch.cuda.get_device_capability(x.device) == (9, 0) and has_compiler()


def few_rows_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> None:
    """`multiply` of gemm.py for up to ROW_TILE rows, where there are `few_rows_tiles`. Raises ValueError for
    others, and for another shape, type or layout."""
    (num_rows, inner), num_columns = x.shape, weight.shape[0]
    check_tensor("x", x, (num_rows, inner), torch.bfloat16)
    check_tensor("weight", weight, (num_columns, inner), torch.bfloat16)
    check_tensor("out", out, (config.num_partials, num_rows, num_columns), torch.float32)
    check_range("x.shape[0]", num_rows, 1, ROW_TILE)
    tiles = few_rows_tiles(num_columns, inner, config, gpu_limits())
    if tiles is None:
        raise ValueError(f"weight: [{num_columns}, {inner}]: expected one that has few_rows_tiles")

    from drift_sdk._kernels.common.cuda_programs import CudaKernel, compile_kernel, launch_kernel

    macros = (("MULTIPLY", f"multiply_few<{tiles.num_stages}>"),)
    kernel = CudaKernel(FILES, "few_rows_product", macros)
    launch_kernel(
        compile_kernel(kernel, x.device.index or 0, tiles.shared_bytes),
        (tiles.num_ctas, config.num_slices),
        tiles.num_threads,
        tiles.shared_bytes,
        x,
        weight,
        out,
        num_rows,
        num_columns,
        inner,
        config.slice_size(inner),
    )
    note_kernel("a product of a few rows", ACCESS, {"weight": weight, "out": out})
