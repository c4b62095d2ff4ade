"""Tiles of the products of experts: the rows that a program owns, and its sums.

A tile of rows belongs to one expert; which one follows from the experts' counts of rows, which every program
reads. There are at most as many tiles as `ExpertGemmConfig.num_row_tiles` says.

Order of summation: tensor cores sum in float32 in ascending order of the inner index. The weights stand on
the M side of the MMA, as in gemm.py, so the instruction is the same for one row and for hundreds, and tiles
do not change the bits. MXFP4 weights are converted in registers, exactly. A byte holds an even and an odd
element of a row, which stay where they are: of every QUANTISED_TILE_K inner indices, the even ones are summed
before the odd ones. This is part of the bits, so that tile is fixed.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk._kernels.experts.mxfp4 import BLOCK_BYTES, BLOCK_SIZE, dequantise_codes, scale_factors
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk._kernels.gemm.heuristic import SHARED_RESERVE

__all__ = [
    "QUANTISED_TILE_K",
    "ExpertGemmConfig",
    "ExpertMatrix",
    "add_product",
    "check_expert_rows",
    "check_matrix",
    "expert_gemm_config",
    "tile_indices",
    "tile_pairs",
]

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
