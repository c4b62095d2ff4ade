"""Products of experts with quantised weights in Triton: the fallback of packed_products.cu, and its oracle.

The kernels read the same bytes, and sum as quantised/twin.py does: a row's bits depend neither on the other
rows nor on how many of them its expert has, and are not those of packed_products.cu. Tiles and programs are
those of expert_gemm.py.

Dependent launch: the kernels wait first. They permit their dependents to start when only the store is left.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import (
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.common.sizes import cdiv, next_power_of_2
from drift_sdk._kernels.experts.expert_tiles import ExpertGemmConfig, tile_indices, tile_pairs
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk._kernels.quantised.packing import PackedWeight
from drift_sdk._kernels.quantised.twin import packed_sums

__all__ = ["twin_expert_multiply"]

TILES = ExpertGemmConfig(tile_n=64, tile_m=16, tile_k=0, num_stages=0, num_warps=4)
"""Tiles of the output and warps; the others have no meaning here."""


@kernel(do_not_specialize=["num_tiles_m", "num_rows"])
def _twin_expert_multiply(
    x_ptr,  # [R, K] of a gated weight, else [R * NUM_ACTIVE, K]: storage type
    codes_ptr,  # uint8, as packing.py arranges them, of all experts
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [E * weight rows], in the order of packed rows, or None
    counts_ptr,  # [E] int32
    pairs_ptr,  # [E, R] int32
    shares_ptr,  # [R * NUM_ACTIVE] fp32
    out_ptr,  # [R * NUM_ACTIVE, N] in the storage type of a gated weight, else [NUM_ACTIVE, R, N] fp32
    num_tiles_m,  # the most tiles of rows
    num_rows,  # R
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    N: tl.constexpr,  # columns of the output
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t): tile t of the output. Longer than other kernels by its signature."""
    wait_for_producers(PDL)
    tile_n, tile_m = tile_indices(num_tiles_m, tl.cdiv(N, TILE_N))
    expert, pair = tile_pairs(counts_ptr, pairs_ptr, tile_m, num_rows, NUM_EXPERTS, PADDED_EXPERTS, TILE_M)
    is_row = pair >= 0
    if tl.max(pair, axis=0) < 0:
        return

    dtype = x_ptr.dtype.element_ty
    column = tile_n * TILE_N + tl.arange(0, TILE_N)
    is_column = column < N
    # The row of a gated weight's gate, with its up 8 rows behind; of another weight, the column's.
    packed_row = column // 8 * 16 + column % 8 if IS_GATED else column
    packed_row += expert.to(tl.int32) * (2 * N if IS_GATED else N)
    x_ptrs = x_ptr + (pair // NUM_ACTIVE if IS_GATED else pair).to(tl.int64)[:, None] * K
    total = packed_sums(
        x_ptrs,
        is_row,
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        offsets_ptr,
        row_scales_ptr,
        packed_row,
        is_column,
        0,
        K,
        K,
        GROUP_SIZE,
        CODES,
        ZERO_POINT,
        TILE_N,
        TILE_M,
    )
    if IS_GATED:
        up = packed_sums(
            x_ptrs,
            is_row,
            codes_ptr,
            scales_ptr,
            zeros_ptr,
            offsets_ptr,
            row_scales_ptr,
            packed_row + 8,
            is_column,
            0,
            K,
            K,
            GROUP_SIZE,
            CODES,
            ZERO_POINT,
            TILE_N,
            TILE_M,
        )
        start_dependents(PDL)
        gate = total.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * N + column[:, None]
        total = activated * up.to(dtype).to(tl.float32)
    else:
        start_dependents(PDL)
        share = tl.load(shares_ptr + pair, mask=is_row, other=0.0)
        row = ((pair % NUM_ACTIVE).to(tl.int64) * num_rows + pair // NUM_ACTIVE)[None, :]
        out_ptrs = out_ptr + row * N + column[:, None]
        total = total.to(dtype).to(tl.float32) * share[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def twin_expert_multiply(x: Tensor, weight: PackedWeight, rows: ExpertRows, out: Tensor) -> None:
    """`packed_gated_expert_multiply` or `packed_expert_multiply`, whose checked arguments it takes."""
    num_columns = out.shape[-1]
    num_tiles_m = TILES.num_row_tiles(rows)
    _twin_expert_multiply[(num_tiles_m * cdiv(num_columns, TILES.tile_n),)](
        x_ptr=x,
        codes_ptr=weight.codes,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        offsets_ptr=weight.offsets,
        row_scales_ptr=weight.row_scales,
        counts_ptr=rows.counts,
        pairs_ptr=rows.pairs,
        shares_ptr=rows.shares,
        out_ptr=out,
        num_tiles_m=num_tiles_m,
        num_rows=rows.num_rows,
        NUM_EXPERTS=rows.num_experts,
        PADDED_EXPERTS=next_power_of_2(rows.num_experts),
        NUM_ACTIVE=rows.num_active,
        N=num_columns,
        K=weight.inner,
        GROUP_SIZE=weight.group_size,
        CODES=weight.code_type,
        ZERO_POINT=weight.zero_point,
        IS_GATED=weight.is_gated,
        TILE_N=TILES.tile_n,
        TILE_M=TILES.tile_m,
        PDL=uses_pdl(),
        num_warps=TILES.num_warps,
        **launch_options(),
    )
