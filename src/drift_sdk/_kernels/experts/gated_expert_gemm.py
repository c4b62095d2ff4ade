"""The gate and up projections of experts, with the activation, each expert with its own rows.

    activated[p] = gate(x[p // K] . weight[e] + bias[e])

for each pair p = row * K + rank of an expert e (routing.py). gate is silu(gate) * up, of N rows of the gate
before N of up; or that of gpt-oss, of alternating rows: (up + 1) * gate * sigmoid(alpha * gate), with gate
limited from above and up on both sides. A row's bits depend neither on the other rows nor on how many of them
its expert has: expert_tiles.py states the order of summation.

Grid: (tiles of the weight times tiles of rows). A program owns TILE_M pairs times TILE_N columns of the
output. Programs behind the last tile of rows end.

Bytes: each weight of an expert that has rows once, if it has no more than TILE_M or the tiles of its rows run
together; and a row of x and one of the output for each pair.

Dependent launch: the rows of experts are listed right before, so the kernel waits first. It permits its
dependents to start after its loop, when only the store is left.
"""

from __future__ import annotations

import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
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

__all__ = ["ClampedActivation", "gated_expert_multiply"]


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
    IS_CLAMPED: tl.constexpr,  # the gate of gpt-oss
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t): tile t of the output. Longer than other kernels by its signature."""
    IS_EVEN: tl.constexpr = N % TILE_N == 0 and K % TILE_K == 0
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
        # As in swiglu.py: the gated value is rounded before the product.
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(out_ptrs, activated.to(dtype), mask=is_row[None, :] & is_column[:, None])


def gated_expert_multiply(
    x: Tensor,
    matrix: ExpertMatrix,
    rows: ExpertRows,
    out: Tensor,
    config: ExpertGemmConfig,
    activation: ClampedActivation | None,
) -> None:
    """The activation of the gate and up projections of each pair's expert, in out [R * K', N].

    x [R, K], matrix of [E, 2 N, K], and `rows` with K' experts for each row, after `list_rows`. activation:
    None for silu(gate) * up, with the gate's rows first; else gate and up rows alternate. Rows of `out` whose
    row is padding are not written. Raises ValueError for another shape, type or layout.
    """
    num_pairs, num_columns = out.shape
    check_tensor("out", out, (rows.num_rows * rows.num_active, num_columns), x.dtype)
    check_tensor("x", x, (rows.num_rows, matrix.inner), out.dtype)
    check_matrix(matrix, (rows.num_experts, 2 * num_columns, matrix.inner), x.dtype)
    check_expert_rows(rows)
    num_tiles_m = config.num_row_tiles(rows)
    _gated_expert_multiply[(num_tiles_m * cdiv(num_columns, config.tile_n),)](
        x_ptr=x,
        values_ptr=matrix.values,
        scales_ptr=matrix.scales,
        bias_ptr=matrix.bias,
        counts_ptr=rows.counts,
        pairs_ptr=rows.pairs,
        out_ptr=out,
        num_tiles_m=num_tiles_m,
        num_rows=rows.num_rows,
        alpha=0.0 if activation is None else activation.alpha,
        limit=0.0 if activation is None else activation.limit,
        NUM_EXPERTS=rows.num_experts,
        PADDED_EXPERTS=next_power_of_2(rows.num_experts),
        NUM_ACTIVE=rows.num_active,
        N=num_columns,
        K=matrix.inner,
        IS_CLAMPED=activation is not None,
        TILE_N=config.tile_n,
        TILE_M=config.tile_m,
        TILE_K=config.inner_tile(matrix),
        NUM_STAGES=config.num_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )
