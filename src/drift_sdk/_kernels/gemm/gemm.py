"""Matrix products whose bits do not depend on the number of rows: one reduction tree for each weight.

    multiply:        out[m, n] = sum over k of x[m, k] * weight[n, k]
    gated_multiply:  out[m, n] = activation(x[m] . weight[n]) * (x[m] . weight[N + n])

Three implementations give the same bits: kernels in Triton, a program for a few rows in CUDA C++, and the
vendor's library. `fastest_multiply` and `fastest_gated_multiply` choose the fastest.

Order of summation: the inner dimension is cut into slices at fixed places (see slices.py). Tensor cores sum
each slice in ascending order of k, in float32, and the sums of the slices are added in ascending order. The
weights stand on the M side of the MMA, so the instruction is the same for one row and for hundreds. Tiles,
pipeline stages, warps, and whether slices are spread over CTAs, therefore do not change the bits.

Grid: (tiles of the weight times tiles of rows, partial sums). A program owns TILE_M rows times TILE_N columns
of one partial sum in the output, and writes each of its elements once.

Bytes: the weight once, and rows * (K + N * slices) elements beside it. Flops: 2 * rows * N * K. Up to about
150 rows of bfloat16, an H200 is bound by the bytes.

Dependent launch: before it waits, a program asks for the first tile of its weights, which never change. It
permits its dependents to start after its loop, when only the store is left.

Products of a few rows in CUDA C++: a warp has 16 rows of the weight and a slice of its columns. It copies
them to shared memory as soon as there is room on a multiprocessor, which is while the kernels before it still
compute the rows of x. Where these are short, memory would be idle otherwise.

Order of summation: as above, by the same instruction: wgmma with the weights on the M side, 16 columns at a
time, in ascending order. Slices are left as partial sums.

Grid: (CTAs of a slice, slices): a CTA for each multiprocessor at most. A warp has one tile, so weights of
more tiles than there are warps are left to Triton's kernel, for which they occupy the GPU well.

Bytes: the weight once; x once for each CTA, from the L2 cache; the partial sums.

Dependent launch: before it waits, a program copies its weights, which never change, as far as they fit. It
permits its dependents to start when it has read x.

Products of the library: from about 200 rows on, cuBLAS is faster. Its kernels sum a slice in ascending order
by the same instructions, as long as it does not cut the inner dimension itself. Whether it does depends on
its version, its settings and the shape. So before the library is used for a shape, both implementations
multiply random numbers of several magnitudes once, and their bits are compared.

They are launched by torch and written to the same partial sums: all slices by one launch, as a batch, which
occupies the GPU better than one after the other; or slice by slice, where the bits of the batch differ or the
slices are not equal. Such a launch waits for everything before it, and lets nothing start before it ends:
`note_library_kernel` tells the check of launch order.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Literal

import torch
import triton.language as tl
from msgspec import Struct, structs
from torch import Tensor

from drift_sdk._kernels.gemm.slices import slice_size
from drift_sdk._kernels.launch.arguments import cdiv, check_range, check_tensor
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, gpu_limits
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    prefetch,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel, note_library_kernel
from drift_sdk._kernels.launch.parallel_compile import is_recording
from drift_sdk._kernels.layers.gates import activate, glu
from drift_sdk.spec.model import Activation

BAND_TILES = tl.constexpr(8)
"""Tiles of the weight in a band, see `_tile_indices`. Triton's tutorial on matrix products has the same value
(GROUP_SIZE_M); tuning does not vary it, and no result depends on it."""

LINE_BITS = tl.constexpr(1024)
"""Bits of a cache line: 128 bytes."""


class GemmTiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Tiles and launch configuration of a product. None of it is part of the result's bits.

    is_spread: one CTA for each slice, which leaves partial sums; otherwise one CTA adds all slices.
    tile_n, tile_m, tile_k: entries of a tile along the weight's rows (columns of the output), along the rows,
    and along the inner dimension; powers of two.
    num_stages, num_warps: of Triton's pipeline, and of a program.
    is_library: the vendor's library is faster, see `library_multiply`. It does not add slices, so they must
    be spread.
    """

    is_spread: bool = True
    tile_n: int = 64
    tile_m: int = 16
    tile_k: int = 128
    num_stages: int = 3
    num_warps: int = 4
    is_library: bool = False

    def config(self, num_slices: int) -> GemmConfig:
        """Return the configuration of a weight with `num_slices` slices, which are spread for the library.
        Tiles may say otherwise: a part of a weight can have the shape of a whole one that has more slices."""
        tiles = structs.replace(self, is_spread=True) if self.is_library and num_slices > 1 else self
        return GemmConfig(num_slices=num_slices, **structs.asdict(tiles))


class GemmConfig(GemmTiles, frozen=True, kw_only=True):
    """Slices, tiles and launch configuration of a product.

    num_slices: slices of the inner dimension, see slices.py; part of the result's bits.
    """

    num_slices: int = 1

    def __post_init__(self) -> None:
        if self.is_library and self.num_partials < self.num_slices:
            raise ValueError(f"{self}: expected slices that are spread, for the library")

    def slice_size(self, inner: int) -> int:
        """Inner indices of every slice but the last, which has the rest of `inner`."""
        return slice_size(inner, self.num_slices)

    @property
    def num_partials(self) -> int:
        """The number of partial sums that `multiply` leaves, to be added in order."""
        return self.num_slices if self.is_spread else 1


@device_function
def _tile_indices(
    NUM_TILES_N: tl.constexpr,  # tiles of the weight
    TILE_M: tl.constexpr,
    M,
    BAND_TILES: tl.constexpr,
):
    """Return the weight tile and the row tile that a program owns.

    Programs run in bands of BAND_TILES weight tiles. Inside a band they go through all its weight tiles
    before the next row tile, so that programs that run together share the band's weights in the L2 cache.
    """
    num_tiles_m = tl.cdiv(M, TILE_M)
    program = tl.program_id(0)
    first_tile = program // (BAND_TILES * num_tiles_m) * BAND_TILES
    band_size = tl.minimum(NUM_TILES_N - first_tile, BAND_TILES)
    place_in_band = program % (BAND_TILES * num_tiles_m)
    return first_tile + place_in_band % band_size, place_in_band // band_size


@device_function
def _prefetch_weights(
    weight_ptr,  # [N, K]
    column,  # [TILE_N]: rows of the weight
    first_inner,  # the slice's first inner index
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ask for the weights of a slice's first tile. They never change, so there is nothing to wait for.

    Measured: asking for four times as much takes the gain back (perf/tried.md).
    """
    LINE_SIZE: tl.constexpr = LINE_BITS // weight_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, max(TILE_K // LINE_SIZE, 1)) * LINE_SIZE
    weight_offset = column[:, None] * K + (first_inner + line)[None, :]
    prefetch(weight_ptr + tl.minimum(weight_offset, N * K - 1), PDL)


@device_function
def _slice_product(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    row,  # [TILE_M]
    column,  # [TILE_N]
    is_row,  # [TILE_M]: row < M
    is_column,  # [TILE_N]: column < N
    first_inner,
    end_inner,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,  # columns and slices consist of whole tiles: no mask but that of rows
):
    """Return the sum over inner indices first_inner ... end_inner - 1: [TILE_N, TILE_M] fp32."""
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    inner_range = tl.arange(0, TILE_K)
    for k in tl.range(first_inner, end_inner, TILE_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            weights = tl.load(
                weight_ptr + column[:, None] * K + (k + inner_range)[None, :], eviction_policy="evict_first"
            )
            x = tl.load(
                x_ptr + row[:, None] * K + (k + inner_range)[None, :], mask=is_row[:, None], other=0.0
            )
        else:
            is_inner = (k + inner_range) < end_inner
            weights = tl.load(
                weight_ptr + column[:, None] * K + (k + inner_range)[None, :],
                mask=is_column[:, None] & is_inner[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            x = tl.load(
                x_ptr + row[:, None] * K + (k + inner_range)[None, :],
                mask=is_row[:, None] & is_inner[None, :],
                other=0.0,
            )
        total = tl.dot(weights, x.T, total, input_precision="ieee")

    return total


@kernel(do_not_specialize=["M"])
def _multiply(
    x_ptr,  # [M, K], storage type
    weight_ptr,  # [N, K], storage type
    out_ptr,  # [num_partials, M, N], fp32
    M,  # rows
    N: tl.constexpr,  # columns: rows of the weight
    K: tl.constexpr,  # inner dimension
    SLICE_SIZE: tl.constexpr,  # inner indices of a slice
    NUM_SLICES: tl.constexpr,
    IS_SPREAD: tl.constexpr,  # one program for each slice
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, s): tile t of the output, and slice s, or all slices if they are not spread."""
    IS_EVEN: tl.constexpr = N % TILE_N == 0 and K % SLICE_SIZE == 0 and SLICE_SIZE % TILE_K == 0
    tile_n, tile_m = _tile_indices(tl.cdiv(N, TILE_N), TILE_M, M, BAND_TILES)
    column = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    _prefetch_weights(weight_ptr, column, tl.program_id(1) * SLICE_SIZE, N, K, TILE_K, PDL)
    wait_for_producers(PDL)
    row = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = row < M, column < N
    if IS_SPREAD:
        first_inner = tl.program_id(1) * SLICE_SIZE
        total = _slice_product(
            x_ptr, weight_ptr, row, column, is_row, is_column,
            first_inner, tl.minimum(first_inner + SLICE_SIZE, K),
            K, TILE_N, TILE_M, TILE_K, NUM_STAGES, IS_EVEN,
        )  # fmt: skip
        out_ptr += tl.program_id(1).to(tl.int64) * M * N
    else:
        total = tl.zeros((TILE_N, TILE_M), tl.float32)
        for slice_index in tl.static_range(NUM_SLICES):
            slice_total = _slice_product(
                x_ptr, weight_ptr, row, column, is_row, is_column,
                slice_index * SLICE_SIZE, min(slice_index * SLICE_SIZE + SLICE_SIZE, K),
                K, TILE_N, TILE_M, TILE_K, NUM_STAGES, IS_EVEN,
            )  # fmt: skip
            # Triton would make an addition the start of the next product, where a slice is one tile.
            total = slice_total if slice_index == 0 else tl.fma(slice_total, 1.0, total)

    start_dependents(PDL)
    out_ptrs = out_ptr + row[None, :] * N + column[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@kernel(do_not_specialize=["M"])
def _gated_multiply(
    x_ptr,  # [M, K], storage type
    weight_ptr,  # [2 * N, K], storage type: N rows of the gate, then N of up
    out_ptr,  # [M, N], storage type
    M,  # rows
    N: tl.constexpr,  # columns of the output
    K: tl.constexpr,  # inner dimension
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t): tile t of the output, from columns n and N + n of the weight."""
    IS_EVEN: tl.constexpr = N % TILE_N == 0 and K % TILE_K == 0
    tile_n, tile_m = _tile_indices(tl.cdiv(N, TILE_N), TILE_M, M, BAND_TILES)
    column = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    _prefetch_weights(weight_ptr, column, 0, 2 * N, K, TILE_K, PDL)
    _prefetch_weights(weight_ptr, N + column, 0, 2 * N, K, TILE_K, PDL)
    wait_for_producers(PDL)
    row = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = row < M, column < N
    inner_range = tl.arange(0, TILE_K)
    gate = tl.zeros((TILE_N, TILE_M), tl.float32)
    up = tl.zeros((TILE_N, TILE_M), tl.float32)
    gate_ptrs = weight_ptr + column[:, None] * K
    for k in tl.range(0, K, TILE_K, num_stages=NUM_STAGES):
        inner = (k + inner_range)[None, :]
        if IS_EVEN:
            x = tl.load(x_ptr + row[:, None] * K + inner, mask=is_row[:, None], other=0.0)
            gate_weights = tl.load(gate_ptrs + inner, eviction_policy="evict_first")
            up_weights = tl.load(gate_ptrs + N * K + inner, eviction_policy="evict_first")
        else:
            x = tl.load(x_ptr + row[:, None] * K + inner, mask=is_row[:, None] & (inner < K), other=0.0)
            weight_mask = is_column[:, None] & (inner < K)
            gate_weights = tl.load(
                gate_ptrs + inner, mask=weight_mask, other=0.0, eviction_policy="evict_first"
            )
            up_weights = tl.load(
                gate_ptrs + N * K + inner, mask=weight_mask, other=0.0, eviction_policy="evict_first"
            )
        gate = tl.dot(gate_weights, x.T, gate, input_precision="ieee")
        up = tl.dot(up_weights, x.T, up, input_precision="ieee")

    start_dependents(PDL)
    # As in the model: both products, the activation and the result are each rounded to the storage type.
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    out_ptrs = out_ptr + row[None, :] * N + column[:, None]
    tl.store(out_ptrs, (activated * up).to(dtype), mask=is_row[None, :] & is_column[:, None])


def multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> None:
    """Partial sums of x times weight transposed, in `out`. The product is their sum, added in order.

    x [M, K] and weight [N, K], of one type; out [config.num_partials, M, N] float32. All contiguous.
    Raises ValueError for another shape, type or layout.
    """
    (num_rows, inner), num_columns = x.shape, weight.shape[0]
    check_tensor("x", x, (num_rows, inner), weight.dtype)
    check_tensor("weight", weight, (num_columns, inner), x.dtype)
    check_tensor("out", out, (config.num_partials, num_rows, num_columns), torch.float32)
    num_tiles = cdiv(num_columns, config.tile_n) * cdiv(num_rows, config.tile_m)
    _multiply[(num_tiles, config.num_partials)](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        M=num_rows,
        N=num_columns,
        K=inner,
        SLICE_SIZE=config.slice_size(inner),
        NUM_SLICES=config.num_slices,
        IS_SPREAD=config.is_spread,
        TILE_N=config.tile_n,
        TILE_M=config.tile_m,
        TILE_K=config.tile_k,
        NUM_STAGES=config.num_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )


def gated_multiply(
    x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, activation: Activation = "silu"
) -> None:
    """activation(x G^T) * (x U^T) in out [M, N], for x [M, K] and weight [2 N, K]: G, and U below it.

    All contiguous and of one type. The inner dimension is one slice, whatever config.num_slices says.
    Raises ValueError for another shape, type or layout.
    """
    (num_rows, inner), num_columns = x.shape, weight.shape[0] // 2
    check_tensor("x", x, (num_rows, inner), weight.dtype)
    check_tensor("weight", weight, (2 * num_columns, inner), x.dtype)
    check_tensor("out", out, (num_rows, num_columns), x.dtype)
    num_tiles = cdiv(num_columns, config.tile_n) * cdiv(num_rows, config.tile_m)
    _gated_multiply[(num_tiles,)](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        M=num_rows,
        N=num_columns,
        K=inner,
        TILE_N=config.tile_n,
        TILE_M=config.tile_m,
        TILE_K=config.tile_k,
        NUM_STAGES=config.num_stages,
        ACTIVATION=activation,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )


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
"""Rows of x that the program has room for, and the most for which it is faster than `multiply`."""
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
    its products, or is slower than `multiply`."""
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
    """`multiply` for up to ROW_TILE rows, where there are `few_rows_tiles`. Raises ValueError for
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
    """Return the state, beside the product, that decides which kernel the library chooses.

    It consists of torch's settings of the library and the sizes of its workspaces. The host may change all of
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

    Arguments: as of the product, which is gated if gate_up is given. The contents of `out` (and of
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
