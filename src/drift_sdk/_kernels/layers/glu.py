"""The gate of an MLP (SwiGLU, GeGLU).

    output[r, i] = activation(gate_up[r, i]) * gate_up[r, I + i]

Grid: (rows, blocks of columns). A program owns BLOCK_COLUMNS columns of one row.

Bytes: three elements of the storage type for each element of the output; nothing else counts.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv
from drift_sdk._kernels.layers.activation import Activation, activate

__all__ = ["glu"]

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
