"""Gates: of an MLP, of an attention's output, and of a shared expert.

The function of an MLP's gate, as a part of other kernels.

silu(x) = x * sigmoid(x)
gelu_tanh(x) = x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u),   u = sqrt(2 / pi) * (x + 0.044715 * x^3)

The gate of an MLP (SwiGLU, GeGLU).

    output[r, i] = activation(gate_up[r, i]) * gate_up[r, I + i]

Grid: (rows, blocks of columns). A program owns BLOCK_COLUMNS columns of one row.

Bytes: three elements of the storage type for each element of the output; nothing else counts.

Dependent launch: the kernel waits first, then permits its dependents to start.

The gate of an attention's output.

    x = sum of slices of gate[r]
    attended[r] = attended[r] * sigmoid(x)

Grid: (rows, blocks of columns). A program owns BLOCK_COLUMNS columns of one row.

Order of summation: slices in ascending order in float32, then rounded to the storage type. The sigmoid and
its product are each rounded too.

Bytes: two elements of the storage type, and NUM_SLICES of fp32 or one of the storage type, for each element.

Dependent launch: the kernel waits first, then permits its dependents to start.

The gate of a shared expert: one factor for each row (Qwen3.5).

    activated[r] = activated[r] * sigmoid(x[r] . weight)

The model multiplies the output of the expert's MLP by the factor. Here its rows are multiplied before their
last product, which is linear: they are shorter, and the product can leave partial sums.

Grid: (rows). A program owns one row. x is in registers: made for H up to 16,384, as in norm.py.

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

from drift_sdk._kernels.launch.arguments import (
    cdiv,
    check_partial_sums,
    check_rows,
    check_tensor,
    next_power_of_2,
)
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import norm_warps
from drift_sdk.spec.model import Activation

GELU_SCALE = tl.constexpr(1.5957691216057308)
"""2 * sqrt(2 / pi)."""
GELU_CUBIC = tl.constexpr(0.044715)


@device_function
def activate(
    x,  # fp32, any shape
    ACTIVATION: tl.constexpr,
):
    """Return the activation of x in fp32."""
    if ACTIVATION == "gelu_tanh":
        # At 10 and beyond, the sigmoid is 0 or 1; nothing overflows.
        bounded = tl.minimum(tl.maximum(x, -10.0), 10.0)
        twice_u = (bounded + bounded * bounded * bounded * GELU_CUBIC) * GELU_SCALE
        return x / (1.0 + tl.exp(-twice_u))
    else:
        return x / (1.0 + tl.exp(-x))


BLOCK_COLUMNS = 1_024
"""Columns of a program: 8 for each of the 128 threads of four warps, loads of 16 bytes of bfloat16."""

NUM_WARPS = 4


@kernel
def _glu(
    gate_up_ptr,  # [R, 2 * SIZE], storage type: gate, then up
    output_ptr,  # [R, SIZE], storage type
    gate_up_stride,
    output_stride,
    SIZE: tl.constexpr,  # columns of the output
    BLOCK_COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block): one block of a row's columns."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = column < SIZE
    gate_ptrs = gate_up_ptr + (row * gate_up_stride + column)
    gate = tl.load(gate_ptrs, mask=column_mask, other=0.0)
    up = tl.load(gate_ptrs + SIZE, mask=column_mask, other=0.0)
    # Two roundings to the storage type: of the gated value, then of its product.
    gated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    product = (gated * up.to(tl.float32)).to(gate.dtype)
    tl.store(output_ptr + row * output_stride + column, product, mask=column_mask)


def glu(gate_up: Tensor, output: Tensor, activation: Activation = "silu") -> None:
    """output [R, I] = activation(gate) * up of gate_up [R, 2 * I], gate before up, in one storage type.

    The gated value is rounded to that type before the product. Rows may have any stride. Raises ValueError
    for another shape, type or layout.
    """
    num_rows, size = output.shape
    check_rows("output", output, (num_rows, size), output.dtype)
    check_rows("gate_up", gate_up, (num_rows, 2 * size), output.dtype)
    _glu[(num_rows, cdiv(size, BLOCK_COLUMNS))](
        gate_up_ptr=gate_up,
        output_ptr=output,
        gate_up_stride=gate_up.stride(0),
        output_stride=output.stride(0),
        SIZE=size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        ACTIVATION=activation,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


@kernel
def _gate_attention(
    attended_ptr,  # [R, SIZE], storage type; updated in place
    gate_ptr,  # [NUM_SLICES, R, SIZE] fp32, or [R, SIZE] in the storage type
    attended_stride,
    gate_slice_stride,
    gate_stride,
    SIZE: tl.constexpr,  # columns
    BLOCK_COLUMNS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block): one block of a row's columns."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = column < SIZE
    attended_ptrs = attended_ptr + (row * attended_stride + column)
    attended = tl.load(attended_ptrs, mask=column_mask, other=0.0)
    gate_ptrs = gate_ptr + (row * gate_stride + column)
    gate = tl.load(gate_ptrs, mask=column_mask, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        gate += tl.load(gate_ptrs + slice_index * gate_slice_stride, mask=column_mask, other=0.0)

    gate = gate.to(attended.dtype).to(tl.float32)
    # Of the magnitude, so that nothing overflows.
    decay = tl.exp(-tl.abs(gate))
    share = (tl.where(gate < 0.0, decay, 1.0) / (1.0 + decay)).to(attended.dtype).to(tl.float32)
    product = (attended.to(tl.float32) * share).to(attended.dtype)
    tl.store(attended_ptrs, product, mask=column_mask)


def gate_attention(attended: Tensor, gate: Tensor) -> None:
    """attended [R, W] times sigmoid(gate), in place, in the storage type.

    gate: [R, W] in the storage type, or fp32 partial sums [num_slices, R, W], added in the order of slices,
    then rounded. The sigmoid is rounded before the product. Rows may have any stride. Raises ValueError for
    another shape, type or layout.
    """
    num_rows, size = attended.shape
    check_rows("attended", attended, (num_rows, size), attended.dtype)
    slices = check_partial_sums("gate", gate, num_rows, size, attended.dtype)
    _gate_attention[(num_rows, cdiv(size, BLOCK_COLUMNS))](
        attended_ptr=attended,
        gate_ptr=gate,
        attended_stride=attended.stride(0),
        gate_slice_stride=slices.slice_stride,
        gate_stride=gate.stride(-2),
        SIZE=size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        NUM_SLICES=slices.num_slices,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


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
