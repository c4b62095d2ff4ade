"""Products by the fastest of three implementations that give the same bits: gemm.py, a program for a few
rows, or the vendor's library.

From about 200 rows on, cuBLAS is faster. Its kernels sum a slice in ascending order by the same instructions,
as long as it does not cut the inner dimension itself. Whether it does depends on its version, its settings
and the shape. So before the library is used for a shape, both implementations multiply random numbers of
several magnitudes once, and their bits are compared.

The products of the library are launched by torch and written to the same partial sums: all slices by one
launch, as a batch, which occupies the GPU better than one after the other; or slice by slice, where the bits
of the batch differ or the slices are not equal. Such a launch waits for everything before it, and lets
nothing start before it ends: `note_library_kernel` tells the check of launch order.

Products of a few rows in CUDA C++, with the bits of `multiply` of gemm.py.

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

import logging
import os
from functools import lru_cache
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.gemm import GemmConfig, gated_multiply, multiply
from drift_sdk._kernels.launch.arguments import check_range, check_tensor
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel, note_library_kernel
from drift_sdk._kernels.launch.parallel_compile import is_recording
from drift_sdk._kernels.layers.gates import glu
from drift_sdk.spec.model import Activation

FILES = ("launch/types.cu", "launch/dependent_launch.cu", "gemm/few_rows.cu")
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
    from drift_sdk._kernels.launch.cuda_programs import has_compiler

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

    from drift_sdk._kernels.launch.cuda_programs import CudaKernel, compile_kernel, launch_kernel

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


log = logging.getLogger("drift_sdk")

LibraryState = tuple[object, ...]
Case = tuple[int, torch.Size, torch.dtype, torch.device, GemmConfig, LibraryState]
"""Number of rows, the weight's shape, type, device, configuration, and `library_state`."""

Way = Literal["batch", "slices"]
"""A way in which the library multiplies: all slices by one launch, or one after the other."""

_ways: dict[Case, Way | None] = {}
"""Results of the comparisons in this process, each for one state of the library: the first way that has the
kernel's bits; None: neither has."""

MAGNITUDES = 6
"""Exponents of the largest and smallest numbers that are multiplied to compare bits. With weights of usual
sizes, products of gates remain in the range of float16."""

MAX_BATCH_ROWS = 2048
"""Most rows for which all slices are one batch: with more, one slice occupies the GPU by itself."""

WORKSPACE_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)


def fastest_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> bool:
    """`multiply`, by the CUDA C++ kernel where it computes the product, and by the library where `config`
    names it and its bits are the same.

    x [M, K], weight [N, K], out [config.num_partials, M, N] float32. Returns False where `config` names the
    library and its bits differ, so that the kernel ran instead, which is slower.
    """
    if has_few_rows_product(x, weight, config):
        few_rows_multiply(x, weight, out, config)
        return True

    if not _is_for_library(x, config) or is_recording():
        multiply(x, weight, out, config)
        return True

    way = library_way(x, weight, out, config)
    if way is None:
        multiply(x, weight, out, config)
    else:
        library_multiply(x, weight, out, config, way)
    return way is not None


def fastest_gated_multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: GemmConfig,
    gate_up: Tensor | None,
    activation: Activation = "silu",
) -> bool:
    """`gated_multiply`, by the library where `config` names it and its bits are the same.

    x [M, K], weight [2 N, K], out [M, N]. gate_up [M, 2 N], of out's type, takes the library's product; it
    is given where `config` names the library, and without it the kernel runs. Returns False where `config`
    names the library and its bits differ, so that the kernel ran instead, which is slower.
    """
    if gate_up is None or not _is_for_library(x, config) or is_recording():
        gated_multiply(x, weight, out, config, activation)
        if gate_up is not None and is_recording():
            glu(gate_up, out, activation)
        return True

    # The gate follows the product in both; which one it is does not matter to the comparison.
    is_exact = library_way(x, weight, out, config, gate_up) is not None
    if is_exact:
        library_gated_multiply(x, weight, out, gate_up, activation)
    else:
        gated_multiply(x, weight, out, config, activation)
    return is_exact


def library_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, way: Way) -> None:
    """Partial sums out [config.num_slices, M, N] float32 of x [M, K] and weight [N, K]: one product each.

    way: "batch" only for slices of equal size.
    """
    size = config.slice_size(x.shape[1])
    if way == "batch":
        rows = x.unflatten(1, (config.num_slices, size)).transpose(0, 1)
        columns = weight.unflatten(1, (config.num_slices, size)).permute(1, 2, 0)
        torch.bmm(rows, columns, out_dtype=torch.float32, out=out)
        note_library_kernel(out)
        return

    for slice_index in range(config.num_slices):
        inner = slice(slice_index * size, (slice_index + 1) * size)
        torch.mm(x[:, inner], weight[:, inner].T, out_dtype=torch.float32, out=out[slice_index])
        note_library_kernel(out[slice_index])


def library_gated_multiply(
    x: Tensor, weight: Tensor, out: Tensor, gate_up: Tensor, activation: Activation = "silu"
) -> None:
    """gate_up [M, 2 N] = x [M, K] times weight [2 N, K] transposed; out [M, N] = activation(gate) * up."""
    library_product(x, weight.T, None, gate_up)
    glu(gate_up, out, activation)


def library_product(x: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = x [M, K] times columns [K, N], a transposed weight, plus bias [N]; summed as the library
    chooses."""
    if bias is None:
        torch.mm(x, columns, out=out)
    else:
        torch.addmm(bias, x, columns, out=out)
    note_library_kernel(out)


def library_state() -> LibraryState:
    """Return what the library's choice of a kernel depends on beside the product.

    These are torch's settings of the library and the sizes of its workspaces. The host may change all of
    them between two engines.
    """
    cuda = torch.backends.cuda
    # These exist from torch 2.13 on. In earlier versions only the environment sets the sizes.
    sizes = [getattr(cuda, name, None) for name in ("cublas_workspace_size", "cublaslt_workspace_size")]
    return (
        cuda.preferred_blas_library(),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        *(size() for size in sizes if size is not None and cuda.is_built()),
        *map(os.environ.get, WORKSPACE_VARIABLES),
    )


def _is_for_library(x: Tensor, config: GemmConfig) -> bool:
    """Whether the library may be used at all. In float32 it uses other instructions than the kernel."""
    return config.is_library and x.device.type == "cuda" and x.dtype != torch.float32


def library_way(
    x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, gate_up: Tensor | None = None
) -> Way | None:
    """The first way in which the library has the kernel's bits; None if it has other bits in all of them. The
    first call for a case runs all, and warns once.

    The arguments are those of the product, which is gated if gate_up is given. The contents of `out` (and of
    gate_up) are undefined afterwards.
    """
    case = x.shape[0], weight.shape, x.dtype, x.device, config, library_state()
    if case not in _ways:
        random = _random_rows(x)
        expected = torch.empty_like(out)
        if gate_up is None:
            multiply(random, weight, expected, config)
        else:
            gated_multiply(random, weight, expected, config)
        _ways[case] = None
        for way in _possible_ways(x.shape[0], x.shape[1], config):
            if gate_up is None:
                library_multiply(random, weight, out, config, way)
            else:
                library_gated_multiply(random, weight, out, gate_up)
            if torch.equal(out, expected):
                _ways[case] = way
                break
        else:
            shape = "x".join(map(str, weight.shape))
            log.warning(
                "%d rows by %s: the library's bits differ: using the kernel, which is slower", case[0], shape
            )

    return _ways[case]


def _possible_ways(num_rows: int, inner: int, config: GemmConfig) -> tuple[Way, ...]:
    """The ways for so many rows, the faster one first."""
    is_equal = config.num_slices * config.slice_size(inner) == inner
    is_batch = config.num_slices > 1 and is_equal and num_rows <= MAX_BATCH_ROWS
    return ("batch", "slices") if is_batch else ("slices",)


def _random_rows(x: Tensor) -> Tensor:
    """Random numbers of x's shape [M, K] and type: in even rows of one magnitude, in odd rows of magnitudes
    from 2^-MAGNITUDES to 2^MAGNITUDES side by side, whose sums depend most on their order."""
    generator = torch.Generator(x.device).manual_seed(0)
    rows = torch.randn(x.shape, generator=generator, dtype=torch.float32, device=x.device)
    exponents = torch.randint(
        -MAGNITUDES, MAGNITUDES + 1, rows[1::2].shape, generator=generator, device=x.device
    )
    rows[1::2] *= torch.exp2(exponents.to(torch.float32))
    return rows.to(x.dtype)
