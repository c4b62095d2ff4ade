"""The gate of an MLP (SwiGLU).

    output[r, i] = silu(gate_up[r, i]) * gate_up[r, I + i]

Grid: (rows, blocks of columns). A program owns BLOCK_COLUMNS columns of one row.

Bytes: three elements of the storage type for each element of the output; nothing else counts.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["swiglu", "swiglu_reference"]

BLOCK_COLUMNS = 1_024
"""Columns of a program: 8 for each of the 128 threads of four warps, loads of 16 bytes of bfloat16."""

NUM_WARPS = 4


@triton.jit
def _swiglu(
    gate_up_ptr,  # [R, 2 * SIZE], storage type: gate, then up
    output_ptr,  # [R, SIZE], storage type
    gate_up_stride,
    output_stride,
    SIZE: tl.constexpr,  # columns of the output
    BLOCK_COLUMNS: tl.constexpr,
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
    wide_gate = gate.to(tl.float32)
    # Two roundings to the storage type: of the gated value, then of its product.
    gated = (wide_gate / (1.0 + tl.exp(-wide_gate))).to(gate.dtype).to(tl.float32)
    product = (gated * up.to(tl.float32)).to(gate.dtype)
    tl.store(output_ptr + row * output_stride + column, product, mask=column_mask)


def swiglu(gate_up: Tensor, output: Tensor) -> None:
    """output [R, I] = silu(gate) * up of gate_up [R, 2 * I], gate before up, in one storage type.

    The gated value is rounded to that type before the product. Rows may have any stride. Raises ValueError
    for another shape, type or layout.
    """
    num_rows, size = output.shape
    check_rows("output", output, (num_rows, size), output.dtype)
    check_rows("gate_up", gate_up, (num_rows, 2 * size), output.dtype)
    _swiglu[(num_rows, triton.cdiv(size, BLOCK_COLUMNS))](
        gate_up_ptr=gate_up,
        output_ptr=output,
        gate_up_stride=gate_up.stride(0),
        output_stride=output.stride(0),
        SIZE=size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, each rounded to the storage type: [R, I] for gate_up [R, 2 * I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
