"""Products with a matrix of each head, whose bits do not depend on the number of rows.

    out[m, h, n] = sum over k of x[m, h, k] * weight[h, n, k]

Order of summation: ascending k, in one slice; tensor cores sum in float32, and the result is rounded once. As
in gemm.py, the weights stand on the M side of the MMA, so one row and hundreds use the same instruction, and
neither tiles nor warps change the bits.

Grid: (heads times tiles of the weight, tiles of rows). A program owns TILE_N columns of TILE_M rows of a
head.

Bytes: the weights once, and rows * heads * (K + N) elements beside them: for GLM-4.7-Flash 3.9 MB of matrices
of keys and 5.2 MB of matrices of values, in bfloat16 and each layer. Flops: 2 * rows * heads * N * K.

Dependent launch: a program waits before it reads, and permits its dependents to start when only the store is
left.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

TILE_N, TILE_K, MOST_ROWS = 64, 64, 64
"""Columns and inner indices of a tile, and most rows of one."""
NUM_STAGES, NUM_WARPS = 3, 4


@kernel(do_not_specialize=["M"])
def _multiply_heads(
    x_ptr,  # [M, NUM_HEADS, K], storage type
    weight_ptr,  # [NUM_HEADS, N, K], storage type, of the strides below
    out_ptr,  # [M, NUM_HEADS, N], storage type; OUT_STRIDE elements from head to head
    M,  # rows
    NUM_HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head and tile of the weight, tile of rows)."""
    NUM_TILES: tl.constexpr = tl.cdiv(N, TILE_N)
    head = tl.program_id(0) // NUM_TILES
    column = tl.program_id(0) % NUM_TILES * TILE_N + tl.arange(0, TILE_N)
    row = (tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = row < M, column < N
    inner = tl.arange(0, TILE_K)
    weight_ptrs = weight_ptr + head.to(tl.int64) * HEAD_STRIDE + column[:, None] * COLUMN_STRIDE
    x_ptrs = x_ptr + ((row * NUM_HEADS + head) * K)[:, None]
    wait_for_producers(PDL)
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=NUM_STAGES):
        index = (k + inner)[None, :]
        weights = tl.load(
            weight_ptrs + index * INNER_STRIDE, mask=is_column[:, None] & (index < K), other=0.0
        )
        x = tl.load(x_ptrs + index, mask=is_row[:, None] & (index < K), other=0.0)
        total = tl.dot(weights, x.T, total, input_precision="ieee")

    start_dependents(PDL)
    out_ptrs = out_ptr + ((row * NUM_HEADS + head) * OUT_STRIDE)[None, :] + column[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The product of each head's rows with its matrix, in `out`.

    x: [M, num_heads, K], contiguous. weight: [num_heads, N, K], whose last two dimensions may have any
    strides. out: [M, num_heads, N], the beginnings of heads of a contiguous [M, num_heads, N or more]. All of
    one type. Raises ValueError for another shape, type or layout.
    """
    (num_rows, num_heads, inner), num_columns = x.shape, weight.shape[1]
    check_tensor("x", x, x.shape, weight.dtype)
    stride = out.stride(1)
    if weight.shape != (num_heads, num_columns, inner):
        expected = [num_heads, num_columns, inner]
        raise ValueError(f"weight: {list(weight.shape)}: expected {expected}")

    is_laid_out = out.stride() == (num_heads * stride, stride, 1) and stride >= num_columns
    if out.shape != (num_rows, num_heads, num_columns) or out.dtype != x.dtype or not is_laid_out:
        found = f"{list(out.shape)} {out.dtype} with strides {out.stride()}"
        expected = [num_rows, num_heads, num_columns]
        raise ValueError(f"out: {found}: expected {expected} {x.dtype}, the beginnings of heads")

    tile_m = min(max(next_power_of_2(num_rows), 16), MOST_ROWS)
    _multiply_heads[(num_heads * cdiv(num_columns, TILE_N), cdiv(num_rows, tile_m))](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        M=num_rows,
        NUM_HEADS=num_heads,
        N=num_columns,
        K=inner,
        HEAD_STRIDE=weight.stride(0),
        COLUMN_STRIDE=weight.stride(1),
        INNER_STRIDE=weight.stride(2),
        OUT_STRIDE=stride,
        TILE_N=TILE_N,
        TILE_M=tile_m,
        TILE_K=TILE_K,
        NUM_STAGES=NUM_STAGES,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
