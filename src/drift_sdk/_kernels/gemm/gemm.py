"""Matrix products whose bits do not depend on the number of rows: one reduction tree for each weight.

    multiply:        out[m, n] = sum over k of x[m, k] * weight[n, k]
    gated_multiply:  out[m, n] = activation(x[m] . weight[n]) * (x[m] . weight[N + n])

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
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct, structs
from torch import Tensor

from drift_sdk._kernels.gemm.slices import slice_size
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    prefetch,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.gates import activate
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
    is_library: the vendor's library is faster, see fastest_gemm.py. It does not add slices, so they must be
    spread.
    """

    is_spread: bool = True
    tile_n: int = 64
    tile_m: int = 16
    tile_k: int = 128
    num_stages: int = 3
    num_warps: int = 4
    is_library: bool = False

    def config(self, num_slices: int) -> GemmConfig:
        """Return the configuration of a weight with so many slices, which are spread for the library. Tiles
        may say otherwise: a part of a weight can have the shape of a whole weight that has more slices."""
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
