"""The gate of a shared expert: one factor for each row (Qwen3.5).

    activated[r] = activated[r] * sigmoid(x[r] . weight)

The model multiplies the output of the expert's MLP by the factor. Here its rows are multiplied before their
last product, which is linear: they are shorter, and the product can leave partial sums.

Grid: (rows). A program owns one row. x is in registers: made for H up to 16,384, as in residual_norm.py.

Order of summation: the products are added in float32, in an order that depends on H alone (`norm_warps`). The
sum and its sigmoid are each rounded to the storage type, as in the model.

Bytes: a row of x, and twice a row of `activated`, for each row; the weight comes from the L2 cache. With a
few rows the time is that of a launch and one trip to memory.

Dependent launch: the kernel follows the product that made `activated`. Before it waits, it reads the weight,
which never changes, and x, which is older than the product. It permits its dependents right after.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.layers.rms_norm import norm_warps

__all__ = ["gate_rows"]

WARP_COLUMNS = 256
"""Columns of a warp at a time: 8 for each thread, loads of 16 bytes of bfloat16."""


@kernel
def _gate_rows(
    x_ptr,  # [R, SIZE], storage type
    weight_ptr,  # [SIZE], storage type
    activated_ptr,  # [R, NUM_COLUMNS], storage type; updated in place
    x_stride,
    activated_stride,
    SIZE: tl.constexpr,  # hidden size
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): one row."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, PADDED_SIZE)
    weight = tl.load(weight_ptr + inner, mask=inner < SIZE, other=0.0)
    x = tl.load(x_ptr + row * x_stride + inner, mask=inner < SIZE, other=0.0, cache_modifier=".cg")
    logit = tl.sum(x.to(tl.float32) * weight.to(tl.float32), axis=0).to(x.dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-logit))).to(x.dtype).to(tl.float32)
    wait_for_producers(PDL)
    start_dependents(PDL)
    for first in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        ptrs = activated_ptr + (row * activated_stride + column)
        activated = tl.load(ptrs, mask=column < NUM_COLUMNS, other=0.0)
        gated = (activated.to(tl.float32) * gate).to(activated.dtype)
        tl.store(ptrs, gated, mask=column < NUM_COLUMNS)


def gate_rows(x: Tensor, weight: Tensor, activated: Tensor) -> None:
    """activated [R, I] *= sigmoid(x [R, H] . weight [H]) in place, all in one storage type.

    x must be older than the product that made `activated` right before. Rows of x and activated may have any
    stride. Raises ValueError for another shape, type or layout.
    """
    (num_rows, size), num_columns, dtype = x.shape, activated.shape[-1], x.dtype
    check_rows("x", x, (num_rows, size), dtype)
    check_tensor("weight", weight, (size,), dtype)
    check_rows("activated", activated, (num_rows, num_columns), dtype)
    num_warps = norm_warps(size)
    _gate_rows[(num_rows,)](
        x_ptr=x,
        weight_ptr=weight,
        activated_ptr=activated,
        x_stride=x.stride(0),
        activated_stride=activated.stride(0),
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
        NUM_COLUMNS=num_columns,
        BLOCK_COLUMNS=min(next_power_of_2(num_columns), WARP_COLUMNS * num_warps),
        PDL=uses_pdl(),
        num_warps=num_warps,
        **launch_options(),
    )
