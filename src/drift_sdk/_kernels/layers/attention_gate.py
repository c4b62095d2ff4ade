"""The gate of an attention's output.

    x = sum of slices of gate[r]
    attended[r] = attended[r] * sigmoid(x)

Grid: (rows, blocks of columns). A program owns BLOCK_COLUMNS columns of one row.

Order of summation: slices in ascending order in float32, then rounded to the storage type. The sigmoid and
its product are each rounded too.

Bytes: two elements of the storage type, and NUM_SLICES of fp32 or one of the storage type, for each element.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_partial_sums, check_rows
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv

__all__ = ["gate_attention"]

BLOCK_COLUMNS = 1_024
"""Columns of a program: 8 for each of the 128 threads of four warps, loads of 16 bytes of bfloat16."""

NUM_WARPS = 4


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
