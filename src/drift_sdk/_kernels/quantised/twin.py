"""Products with quantised weights in Triton: the fallback of multiply.cu, and its oracle in tests.

The kernel reads the same bytes (packing.py), so an error in their arrangement shows in both. It is written
for clarity: an address is computed for each code. A program sums a slice by groups in ascending order, by a
product and an addition each; its bits differ from those of multiply.cu.

Grid: (tiles of TILE_N rows of the weight times tiles of TILE_M rows of x, slices).

Dependent launch: the kernel waits first. It permits its dependents to start after its loop.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import (
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.common.sizes import cdiv
from drift_sdk._kernels.layers.gates import Activation, glu
from drift_sdk._kernels.quantised.dequantise import (
    natural_column,
    packed_codes,
    packed_numbers,
    packed_zeros,
    scale_place,
)
from drift_sdk._kernels.quantised.packing import PackedWeight

__all__ = ["packed_sums", "twin_gated_multiply", "twin_multiply"]

TILE_N = 64
TILE_M = 16
NUM_WARPS = 4


@device_function
def packed_sums(
    x_ptrs,  # [TILE_M, 1]: rows of x
    is_row,  # [TILE_M]
    codes_ptr,  # uint8, as packing.py arranges them
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [N], in the order of packed rows, or None
    packed_row,  # [TILE_N]
    is_column,  # [TILE_N]
    first_inner,
    end_inner,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Return the sums [TILE_N, TILE_M] fp32 of some packed rows times rows of x, from first_inner on."""
    NUM_UNITS: tl.constexpr = (K + 63) // 64
    dtype = x_ptrs.dtype.element_ty
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for k in range(first_inner, end_inner, GROUP_SIZE):
        inner = k + tl.arange(0, GROUP_SIZE)
        is_inner = inner < end_inner
        is_code = is_column[:, None] & is_inner[None, :]
        codes = packed_codes(codes_ptr, packed_row[:, None], inner[None, :], is_code, NUM_UNITS, CODES)
        place = scale_place(packed_row, k // GROUP_SIZE, NUM_UNITS * 64 // GROUP_SIZE)
        zeros = packed_zeros(zeros_ptr, place, is_column, ZERO_POINT)[:, None]
        weights = tl.where(is_code, packed_numbers(codes, zeros, dtype, CODES), 0.0).to(dtype)
        x = tl.load(x_ptrs + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        part = tl.dot(weights, x.T, input_precision="ieee")
        if scales_ptr is not None:
            part *= tl.load(scales_ptr + place, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + place, mask=is_column, other=0.0).to(tl.float32)
            part += offsets[:, None] * tl.sum(x.to(tl.float32), axis=1)[None, :]
        total += part

    if row_scales_ptr is not None:
        total *= tl.load(row_scales_ptr + packed_row, mask=is_column, other=0.0)[:, None]
    return total


@kernel(do_not_specialize=["M"])
def _twin_multiply(
    x_ptr,  # [M, K], storage type
    codes_ptr,  # uint8, as packing.py arranges them
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [N], in the order of packed rows, or None
    bias_ptr,  # [N], storage type, or None
    out_ptr,  # [slices, M, N] fp32; of a gated weight [M, N] in the storage type, the gate before up
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICE_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, s): tile t of the output, slice s. Longer than other kernels by its signature."""
    num_tiles_m = tl.cdiv(M, TILE_M)
    packed_row = tl.program_id(0) // num_tiles_m * TILE_N + tl.arange(0, TILE_N)
    row = (tl.program_id(0) % num_tiles_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = row < M, packed_row < N
    wait_for_producers(PDL)
    first_inner = tl.program_id(1) * SLICE_SIZE
    total = packed_sums(
        x_ptr + row[:, None] * K,
        is_row,
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        offsets_ptr,
        row_scales_ptr,
        packed_row,
        is_column,
        first_inner,
        tl.minimum(first_inner + SLICE_SIZE, K),
        K,
        GROUP_SIZE,
        CODES,
        ZERO_POINT,
        TILE_N,
        TILE_M,
    )
    start_dependents(PDL)
    column = natural_column(packed_row, N, IS_GATED)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    out_ptr += tl.program_id(1).to(tl.int64) * M * N
    out_ptrs = out_ptr + row[None, :] * N + column[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def twin_multiply(x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """`quantised_multiply`, whose checked arguments it takes."""
    _launch(x, weight, None, out)


def twin_gated_multiply(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    gate_up: Tensor,
    activation: Activation = "silu",
    bias: Tensor | None = None,
) -> None:
    """`quantised_gated_multiply`, whose checked arguments it takes. Two kernels."""
    _launch(x, weight, bias, gate_up)
    glu(gate_up, out, activation)


def _launch(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    num_rows, num_columns = x.shape[0], weight.num_columns
    num_tiles = cdiv(num_columns, TILE_N) * cdiv(num_rows, TILE_M)
    _twin_multiply[(num_tiles, weight.num_slices)](
        x_ptr=x,
        codes_ptr=weight.codes,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        offsets_ptr=weight.offsets,
        row_scales_ptr=weight.row_scales,
        bias_ptr=bias,
        out_ptr=out,
        M=num_rows,
        N=num_columns,
        K=weight.inner,
        SLICE_SIZE=weight.slice_size,
        GROUP_SIZE=weight.group_size,
        CODES=weight.code_type,
        ZERO_POINT=weight.zero_point,
        IS_GATED=weight.is_gated,
        TILE_N=TILE_N,
        TILE_M=TILE_M,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
