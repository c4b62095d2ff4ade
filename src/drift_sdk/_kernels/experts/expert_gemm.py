"""The down projections of experts, each with its own rows, weighted by their shares of a row.

    partials[p % K, p // K] = share[p] * (x[p] . weight[e] + bias[e])

for each pair p = row * K + rank of an expert e (routing.py). The partial sums of a row's K experts are those
of a product with K slices: `add_norm` adds them in the order of the ranks. A row's bits depend neither on the
other rows nor on how many of them its expert has: expert_tiles.py states the order of summation.

Grid: (tiles of the weight times tiles of rows). A program owns TILE_M pairs times TILE_N columns of the
output. Programs behind the last tile of rows end.

Bytes: each weight of an expert that has rows once, if it has no more than TILE_M or the tiles of its rows run
together; a row of x and one of float32 for each pair.

Dependent launch: the rows of experts were listed before the kernel before this one, so a program finds its
rows, and asks for its first weights, before it waits. It permits its dependents to start after its loop, when
only the store is left.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import (
    launch_options,
    prefetch,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.common.sizes import cdiv, next_power_of_2
from drift_sdk._kernels.experts.expert_tiles import (
    ExpertGemmConfig,
    ExpertMatrix,
    add_product,
    check_expert_rows,
    check_matrix,
    tile_indices,
    tile_pairs,
)
from drift_sdk._kernels.experts.mxfp4 import BLOCK_SIZE
from drift_sdk._kernels.experts.routing import ExpertRows

__all__ = ["expert_multiply"]


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
    check_expert_rows(rows)
    num_tiles_m = config.num_row_tiles(rows)
    _expert_multiply[(num_tiles_m * cdiv(num_columns, config.tile_n),)](
        x_ptr=x,
        values_ptr=matrix.values,
        scales_ptr=matrix.scales,
        bias_ptr=matrix.bias,
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
        K=matrix.inner,
        TILE_N=config.tile_n,
        TILE_M=config.tile_m,
        TILE_K=config.inner_tile(matrix),
        NUM_STAGES=config.num_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )
