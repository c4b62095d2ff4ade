"""Products of experts, each with its own rows: gate and up projections with the activation, down projections.

The gate and up projections of experts, with the activation, each expert with its own rows.

    activated[p] = gate(x[p // K] . weight[e] + bias[e])

for each pair p = row * K + rank of an expert e (routing.py). gate is activation(gate) * up, of N rows of the
gate before N of up; or that of gpt-oss, of alternating rows: (up + 1) * gate * sigmoid(alpha * gate), with
gate limited from above and up on both sides. A row's bits depend neither on the other rows nor on how many of
them its expert has: the order of summation is stated below.

Grid: (tiles of the weight times tiles of rows). A program owns TILE_M pairs times TILE_N columns of the
output. Programs behind the last tile of rows end.

Bytes: each weight of an expert that has rows once, if it has no more than TILE_M or the tiles of its rows run
together; and a row of x and one of the output for each pair.

Dependent launch: the rows of experts are listed right before, so the kernel waits first. It permits its
dependents to start after its loop, when only the store is left.

The down projections of experts, each with its own rows, weighted by their shares of a row.

    partials[p % K, p // K] = share[p] * (x[p] . weight[e] + bias[e])

for each pair p = row * K + rank of an expert e (routing.py). The partial sums of a row's K experts are those
of a product with K slices: `add_norm` adds them in the order of the ranks. A row's bits depend neither on the
other rows nor on how many of them its expert has: the order of summation is stated below.

Grid: (tiles of the weight times tiles of rows). A program owns TILE_M pairs times TILE_N columns of the
output. Programs behind the last tile of rows end.

Bytes: each weight of an expert that has rows once, if it has no more than TILE_M or the tiles of its rows run
together; a row of x and one of float32 for each pair.

Dependent launch: the rows of experts were listed before the kernel before this one, so a program finds its
rows, and asks for its first weights, before it waits. It permits its dependents to start after its loop, when
only the store is left.

Tiles of the products of experts: the rows that a program owns, and its sums.

A tile of rows belongs to one expert; which one follows from the experts' counts of rows, which every program
reads. There are at most as many tiles as `ExpertGemmConfig.num_row_tiles` says.

Order of summation: tensor cores sum in float32 in ascending order of the inner index. The weights stand on
the M side of the MMA, as in gemm.py, so the instruction is the same for one row and for hundreds, and tiles
do not change the bits. MXFP4 weights are converted in registers, exactly. A byte holds an even and an odd
element of a row, which stay where they are: of every QUANTISED_TILE_K inner indices, the even ones are summed
before the odd ones. This is part of the bits, so that tile is fixed.

Numbers of MXFP4 in registers: codes of 4 bits and block scales to the storage type, exactly.

A code c stands for 0, 0.5, 1, 1.5, 2, 3, 4 or 6 (bits 0 to 2), negative if bit 3 is set, and a scale s for
2 ** (s - 127), with s from 0 to 252. Two bits of exponent and one of mantissa, put at the place that they
have in bfloat16, are the number times 2 ** -126; two products with powers of two, both exact, do the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk._kernels.gemm.heuristic import SHARED_RESERVE
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
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
from drift_sdk.quantised.formats import MXFP4_BLOCK
from drift_sdk.spec.model import Activation

BLOCK_SIZE = tl.constexpr(MXFP4_BLOCK)

BLOCK_BYTES = tl.constexpr(16)

CODE_FACTOR = tl.constexpr(2.0**126)


@device_function
def dequantise_codes(
    codes,  # integers 0 to 15
    factors,  # of the same shape, storage type: those of `scale_factors`
):
    """Return the numbers, in the storage type: float32 or bfloat16."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 6)
    return _from_bits(bits, factors.dtype) * CODE_FACTOR * factors


@device_function
def scale_factors(
    scales,  # uint8, at most 252
    DTYPE: tl.constexpr,  # the storage type
):
    """Return 2 ** (scale - 127) in the storage type. Scale 0 is a subnormal number."""
    wide = scales.to(tl.int32)
    return _from_bits(tl.where(wide == 0, 64, wide << 7), DTYPE)


@device_function
def _from_bits(bits, DTYPE: tl.constexpr):
    """Return the numbers whose bits in bfloat16 are the low 16 of integers, in the storage type."""
    if DTYPE == tl.float32:
        numbers = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        numbers = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return numbers


QUANTISED_TILE_K = 128
"""Inner indices of a tile of MXFP4 weights: 64 bytes of a row. Part of the result's bits."""

BAND_TILES = tl.constexpr(8)
"""Tiles of the weight in a band, as in gemm.py: programs that run together share a band's weights in the L2
cache. No result depends on it."""


class ExpertMatrix(Struct, frozen=True):
    """A matrix of each expert and its bias.

    values: [E, N, K] of the storage type; or [E, N, K / 2] uint8, MXFP4 codes, with the even element of each
    byte in the low four bits.
    scales: [E, N, K / 32] uint8, at most 252; None for values that are not quantised.
    bias: [E, N] of the storage type, or None.
    """

    values: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @property
    def inner(self) -> int:
        """K."""
        return self.values.shape[2] * (1 if self.scales is None else 2)


class ExpertGemmConfig(Struct, frozen=True):
    """Tiles and launch configuration of a product of experts. No result depends on it.

    tile_n, tile_m, tile_k: entries of a tile along the weight's rows, along the pairs, and along the inner
    dimension; powers of two. tile_k is QUANTISED_TILE_K for quantised weights, whatever is given here.
    num_stages, num_warps: of Triton's pipeline, and of a program.
    """

    tile_n: int
    tile_m: int
    tile_k: int
    num_stages: int
    num_warps: int

    def inner_tile(self, matrix: ExpertMatrix) -> int:
        """Inner indices of a tile."""
        return self.tile_k if matrix.scales is None else QUANTISED_TILE_K

    def num_row_tiles(self, rows: ExpertRows) -> int:
        """The most tiles of rows that there can be, whatever the experts of the rows are."""
        num_pairs = rows.num_rows * rows.num_active
        num_used = min(rows.num_experts, num_pairs)
        return num_used + (num_pairs - num_used) // self.tile_m


SOME_ROWS = (64, ExpertGemmConfig(64, 64, 64, 4, 4))
GATED_CONFIGS = (
    (1 / 8, ExpertGemmConfig(64, 16, 128, 4, 4)),
    (8, ExpertGemmConfig(64, 16, 128, 3, 4)),
    SOME_ROWS,
    (2**31, ExpertGemmConfig(128, 128, 64, 3, 8)),
)
DOWN_CONFIGS = (
    (8, ExpertGemmConfig(128, 16, 64, 6, 4)),
    SOME_ROWS,
    (2**31, ExpertGemmConfig(128, 128, 64, 3, 4)),
)
WIDE_CONFIGS = ((8, ExpertGemmConfig(64, 16, 64, 2, 4)), (2**31, ExpertGemmConfig(64, 64, 64, 2, 4)))
"""Pairs (highest average number of rows of an expert, configuration): of the gated and the other product with
two bytes a number, and of both with four. For Qwen3-30B-A3B on an H200, those of up to 8 rows are the best of
23, and the last ones, with 128 rows, within 3% of the best of 15; the others are not tuned. The largest take
147,456 bytes of shared memory; see `expert_gemm_config` for GPUs that have less."""


def expert_gemm_config(rows: ExpertRows, dtype: torch.dtype, *, is_gated: bool) -> ExpertGemmConfig:
    """Return the configuration for a number of rows of a storage type, with as many of its stages as fit the
    shared memory of the current GPU."""
    rows_per_expert = rows.num_rows * rows.num_active / rows.num_experts
    configs = WIDE_CONFIGS if dtype.itemsize == 4 else GATED_CONFIGS if is_gated else DOWN_CONFIGS
    config = next(config for most, config in configs if rows_per_expert <= most)
    tile_rows = config.tile_n * (2 if is_gated else 1) + config.tile_m
    stage_bytes = tile_rows * config.tile_k * dtype.itemsize
    num_fitting = (gpu_limits().shared_bytes - SHARED_RESERVE) // stage_bytes
    return replace(config, num_stages=min(config.num_stages, num_fitting))


@device_function
def tile_indices(num_tiles_m, NUM_TILES_N: tl.constexpr):
    """Return the weight tile and the row tile that a program owns: bands as in gemm.py."""
    program = tl.program_id(0)
    first_tile = program // (BAND_TILES * num_tiles_m) * BAND_TILES
    band_size = tl.minimum(NUM_TILES_N - first_tile, BAND_TILES)
    place_in_band = program % (BAND_TILES * num_tiles_m)
    return first_tile + place_in_band % band_size, place_in_band // band_size


@device_function
def tile_pairs(
    counts_ptr,  # [NUM_EXPERTS] int32
    pairs_ptr,  # [NUM_EXPERTS, R] int32
    tile,  # of rows
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Return the expert of a tile of rows, and its pairs [TILE_M], -1 where there is none.

    The tiles of an expert follow those of the expert before. Behind the last tile, all pairs are -1.
    """
    expert = tl.arange(0, PADDED_EXPERTS)
    counts = tl.load(counts_ptr + expert, mask=expert < NUM_EXPERTS, other=0, cache_modifier=".cg")
    ends = tl.cumsum(tl.cdiv(counts, TILE_M), axis=0)
    is_before = ends <= tile
    mine = tl.sum(is_before.to(tl.int32), axis=0)
    count = tl.sum(tl.where(expert == mine, counts, 0), axis=0)
    place = (tile - tl.max(tl.where(is_before, ends, 0), axis=0)) * TILE_M + tl.arange(0, TILE_M)
    mine = tl.minimum(mine, NUM_EXPERTS - 1)
    pair_ptrs = pairs_ptr + mine.to(tl.int64) * num_rows + place
    return mine.to(tl.int64), tl.load(pair_ptrs, mask=place < count, other=-1, cache_modifier=".cg")


@device_function
def _load_weights(
    values_ptr,  # [N, K], or [N, K / 2] uint8: of one expert
    weight_row,  # [TILE_N]
    is_column,  # [TILE_N]: the row of the weight exists
    first,  # the tile's first element of a row of values
    SIZE: tl.constexpr,  # elements of a row of values
    TILE_SIZE: tl.constexpr,  # elements of a row in the tile
    IS_EVEN: tl.constexpr,  # no mask is needed
):
    """Return a tile of values [TILE_N, TILE_SIZE]."""
    place = first + tl.arange(0, TILE_SIZE)
    value_ptrs = values_ptr + weight_row[:, None] * SIZE + place[None, :]
    if IS_EVEN:
        values = tl.load(value_ptrs, eviction_policy="evict_first")
    else:
        mask = is_column[:, None] & (place < SIZE)[None, :]
        values = tl.load(value_ptrs, mask=mask, other=0, eviction_policy="evict_first")
    return values


@device_function
def add_product(
    total,  # [TILE_N, TILE_M] fp32
    x,  # [TILE_M, TILE_K]
    values_ptr,  # of one expert, see `_load_weights`
    scales_ptr,  # [N, K / 32] uint8, of one expert; or None
    weight_row,
    is_column,
    first_inner,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Return total plus the product of TILE_K inner indices from first_inner on."""
    if scales_ptr is None:
        weights = _load_weights(values_ptr, weight_row, is_column, first_inner, K, TILE_K, IS_EVEN)
        total = tl.dot(weights, x.T, total, input_precision="ieee")
    else:
        codes = _load_weights(
            values_ptr, weight_row, is_column, first_inner // 2, K // 2, TILE_K // 2, IS_EVEN
        ).to(tl.int32)
        NUM_BLOCKS: tl.constexpr = TILE_K // BLOCK_SIZE
        scales = _load_weights(
            scales_ptr,
            weight_row,
            is_column,
            first_inner // BLOCK_SIZE,
            K // BLOCK_SIZE,
            NUM_BLOCKS,
            IS_EVEN,
        )
        factors = scale_factors(scales, x.dtype)
        factors = tl.broadcast_to(factors[:, :, None], (TILE_N, NUM_BLOCKS, BLOCK_BYTES))
        factors = tl.reshape(factors, (TILE_N, TILE_K // 2))
        x_even, x_odd = tl.split(tl.reshape(x, (TILE_M, TILE_K // 2, 2)))
        even, odd = dequantise_codes(codes & 15, factors), dequantise_codes(codes >> 4, factors)
        total = tl.dot(even, x_even.T, total, input_precision="ieee")
        total = tl.dot(odd, x_odd.T, total, input_precision="ieee")
    return total


def check_expert_rows(rows: ExpertRows) -> None:
    num_rows, num_experts, num_active = rows.num_rows, rows.num_experts, rows.num_active
    check_tensor("pairs", rows.pairs, (num_experts, num_rows), torch.int32)
    check_tensor("counts", rows.counts, (num_experts,), torch.int32)
    check_tensor("shares", rows.shares, (num_rows, num_active), torch.float32)


def check_matrix(matrix: ExpertMatrix, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_experts, num_columns, inner = shape
    check_tensors((num_experts, num_columns), dtype, bias=matrix.bias)
    if matrix.scales is None:
        check_tensor("values", matrix.values, shape, dtype)
        return

    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"x: {dtype}: expected torch.float32 or torch.bfloat16 for MXFP4 values")

    check_tensor("values", matrix.values, (num_experts, num_columns, inner // 2), torch.uint8)
    num_blocks = inner // BLOCK_SIZE.value
    check_tensor("scales", matrix.scales, (num_experts, num_columns, num_blocks), torch.uint8)


def grid_of(rows: ExpertRows, num_columns: int, config: ExpertGemmConfig) -> tuple[int]:
    """The number of programs of a product with an output of so many columns."""
    return (config.num_row_tiles(rows) * cdiv(num_columns, config.tile_n),)


def launch_arguments(
    x: Tensor, matrix: ExpertMatrix, rows: ExpertRows, out: Tensor, config: ExpertGemmConfig
) -> dict[str, Any]:
    """The arguments that both kernels take, by name. Raises ValueError for rows of another shape or type."""
    check_expert_rows(rows)
    return {
        "x_ptr": x,
        "values_ptr": matrix.values,
        "scales_ptr": matrix.scales,
        "bias_ptr": matrix.bias,
        "counts_ptr": rows.counts,
        "pairs_ptr": rows.pairs,
        "out_ptr": out,
        "num_tiles_m": config.num_row_tiles(rows),
        "num_rows": rows.num_rows,
        "NUM_EXPERTS": rows.num_experts,
        "PADDED_EXPERTS": next_power_of_2(rows.num_experts),
        "NUM_ACTIVE": rows.num_active,
        "N": out.shape[-1],
        "K": matrix.inner,
        "TILE_N": config.tile_n,
        "TILE_M": config.tile_m,
        "TILE_K": config.inner_tile(matrix),
        "NUM_STAGES": config.num_stages,
        "PDL": uses_pdl(),
        "num_warps": config.num_warps,
    }


class ClampedActivation(Struct, frozen=True):
    """(up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit."""

    alpha: float
    limit: float


@kernel(do_not_specialize=["num_tiles_m", "num_rows"])
def _gated_expert_multiply(
    x_ptr,  # [R, K], storage type
    values_ptr,  # [E, 2 * N, K], storage type; or [E, 2 * N, K / 2] uint8
    scales_ptr,  # [E, 2 * N, K / 32] uint8; or None
    bias_ptr,  # [E, 2 * N], storage type; or None
    counts_ptr,  # [E] int32
    pairs_ptr,  # [E, R] int32
    out_ptr,  # [R * NUM_ACTIVE, N], storage type: by pair
    num_tiles_m,  # the most tiles of rows
    num_rows,  # R
    alpha,
    limit,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    N: tl.constexpr,  # columns of the output
    K: tl.constexpr,  # inner dimension
    ACTIVATION: tl.constexpr,  # see gates.py; or "clamped", the gate of gpt-oss
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t): tile t of the output. Longer than other kernels by its signature."""
    IS_EVEN: tl.constexpr = N % TILE_N == 0 and K % TILE_K == 0
    IS_CLAMPED: tl.constexpr = ACTIVATION == "clamped"
    PACKED: tl.constexpr = 1 if scales_ptr is None else 2
    wait_for_producers(PDL)
    tile_n, tile_m = tile_indices(num_tiles_m, tl.cdiv(N, TILE_N))
    expert, pair = tile_pairs(counts_ptr, pairs_ptr, tile_m, num_rows, NUM_EXPERTS, PADDED_EXPERTS, TILE_M)
    is_row = pair >= 0
    if tl.max(pair, axis=0) < 0:
        return

    column = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    is_column = column < N
    gate_row = column * 2 if IS_CLAMPED else column
    up_row = column * 2 + 1 if IS_CLAMPED else N + column
    values_ptr += expert * (2 * N * K // PACKED)
    if scales_ptr is not None:
        scales_ptr += expert * (2 * N * K // BLOCK_SIZE)
    x_ptrs = x_ptr + (pair // NUM_ACTIVE).to(tl.int64)[:, None] * K
    gate = tl.zeros((TILE_N, TILE_M), tl.float32)
    up = tl.zeros((TILE_N, TILE_M), tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=NUM_STAGES):
        inner = (k + tl.arange(0, TILE_K))[None, :]
        mask = is_row[:, None] if IS_EVEN else is_row[:, None] & (inner < K)
        x = tl.load(x_ptrs + inner, mask=mask, other=0.0)
        gate = add_product(
            gate, x, values_ptr, scales_ptr, gate_row, is_column, k, K, TILE_N, TILE_M, TILE_K, IS_EVEN
        )
        up = add_product(
            up, x, values_ptr, scales_ptr, up_row, is_column, k, K, TILE_N, TILE_M, TILE_K, IS_EVEN
        )

    start_dependents(PDL)
    if bias_ptr is not None:
        bias_ptr += expert * (2 * N)
        gate += tl.load(bias_ptr + gate_row, mask=is_column, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + up_row, mask=is_column, other=0.0).to(tl.float32)[:, None]

    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if IS_CLAMPED:
        # Comparisons, so that NaN remains NaN. The activation is rounded once.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        activated = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    else:
        # As in gates.py: the gated value is rounded before the product.
        activated = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(out_ptrs, activated.to(dtype), mask=is_row[None, :] & is_column[:, None])


def gated_expert_multiply(
    x: Tensor,
    matrix: ExpertMatrix,
    rows: ExpertRows,
    out: Tensor,
    config: ExpertGemmConfig,
    activation: ClampedActivation | Activation = "silu",
) -> None:
    """The activation of the gate and up projections of each pair's expert, in out [R * K', N].

    x [R, K], matrix of [E, 2 N, K], and `rows` with K' experts for each row, after `list_rows`. activation:
    a name for activation(gate) * up, with the gate's rows first; else gate and up rows alternate. Rows of
    `out` whose row is padding are not written. Raises ValueError for another shape, type or layout.
    """
    num_pairs, num_columns = out.shape
    check_tensor("out", out, (rows.num_rows * rows.num_active, num_columns), x.dtype)
    check_tensor("x", x, (rows.num_rows, matrix.inner), out.dtype)
    check_matrix(matrix, (rows.num_experts, 2 * num_columns, matrix.inner), x.dtype)
    clamped = activation if isinstance(activation, ClampedActivation) else None
    _gated_expert_multiply[grid_of(rows, num_columns, config)](
        **launch_arguments(x, matrix, rows, out, config),
        alpha=0.0 if clamped is None else clamped.alpha,
        limit=0.0 if clamped is None else clamped.limit,
        ACTIVATION="clamped" if isinstance(activation, ClampedActivation) else activation,
        **launch_options(),
    )


@kernel(do_not_specialize=["num_tiles_m", "num_rows"])
def _expert_multiply(
    x_ptr,  # [R * NUM_ACTIVE, K], storage type: by pair
    values_ptr,  # [E, N, K], storage type; or [E, N, K / 2] uint8
    scales_ptr,  # [E, N, K / 32] uint8; or None
    bias_ptr,  # [E, N], storage type; or None
    counts_ptr,  # [E] int32
    pairs_ptr,  # [E, R] int32
    shares_ptr,  # [R * NUM_ACTIVE] fp32
    out_ptr,  # [NUM_ACTIVE, R, N] fp32
    num_tiles_m,  # the most tiles of rows
    num_rows,  # R
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    N: tl.constexpr,  # columns of the output
    K: tl.constexpr,  # inner dimension
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t): tile t of the output."""
    IS_EVEN: tl.constexpr = N % TILE_N == 0 and K % TILE_K == 0
    PACKED: tl.constexpr = 1 if scales_ptr is None else 2
    tile_n, tile_m = tile_indices(num_tiles_m, tl.cdiv(N, TILE_N))
    expert, pair = tile_pairs(counts_ptr, pairs_ptr, tile_m, num_rows, NUM_EXPERTS, PADDED_EXPERTS, TILE_M)
    column = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    is_column = column < N
    values_ptr += expert * (N * K // PACKED)
    prefetch(values_ptr + tl.minimum(column, N - 1) * (K // PACKED), PDL)
    wait_for_producers(PDL)
    is_row = pair >= 0
    if tl.max(pair, axis=0) < 0:
        return

    if scales_ptr is not None:
        scales_ptr += expert * (N * K // BLOCK_SIZE)
    x_ptrs = x_ptr + pair.to(tl.int64)[:, None] * K
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=NUM_STAGES):
        inner = (k + tl.arange(0, TILE_K))[None, :]
        mask = is_row[:, None] if IS_EVEN else is_row[:, None] & (inner < K)
        x = tl.load(x_ptrs + inner, mask=mask, other=0.0)
        total = add_product(
            total, x, values_ptr, scales_ptr, column, is_column, k, K, TILE_N, TILE_M, TILE_K, IS_EVEN
        )

    start_dependents(PDL)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * N + column
        total += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[:, None]

    share = tl.load(shares_ptr + pair, mask=is_row, other=0.0)
    total = total.to(x_ptr.dtype.element_ty).to(tl.float32) * share[None, :]
    row = ((pair % NUM_ACTIVE).to(tl.int64) * num_rows + pair // NUM_ACTIVE)[None, :]
    tl.store(out_ptr + row * N + column[:, None], total, mask=is_row[None, :] & is_column[:, None])


def expert_multiply(
    x: Tensor, matrix: ExpertMatrix, rows: ExpertRows, out: Tensor, config: ExpertGemmConfig
) -> None:
    """Each pair's share of its expert's product, as partial sums out [K', R, N] float32.

    x [R * K', K], matrix of [E, N, K], and `rows` with K' experts for each row, after `list_rows`. A product
    is rounded to x's type before it is weighted. The rows of padding are not written. Raises ValueError for
    another shape, type or layout.
    """
    num_columns = out.shape[2]
    check_tensor("out", out, (rows.num_active, rows.num_rows, num_columns), torch.float32)
    check_tensor("x", x, (rows.num_rows * rows.num_active, matrix.inner), x.dtype)
    check_matrix(matrix, (rows.num_experts, num_columns, matrix.inner), x.dtype)
    _expert_multiply[grid_of(rows, num_columns, config)](
        **launch_arguments(x, matrix, rows, out, config), shares_ptr=rows.shares, **launch_options()
    )
