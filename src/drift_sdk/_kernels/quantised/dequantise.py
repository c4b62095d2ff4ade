"""The CUDA programs of quantised weights: when they apply, and the format of a weight as their arguments.

Quantised weights back to their numbers: a whole weight, and the parts of it that Triton kernels need.

    dequantise:  out[n, k] = (code[n, k] - zero) * scale, rounded once to the storage type

dequantise.cu does it for bfloat16 on GPUs of compute capability 9.0; elsewhere the kernel of this file, with
the same bits. Grid of the latter: (tiles of TILE_N packed rows, tiles of TILE_K columns).

Bytes: the codes and scales once, and the output.

Dependent launch: the kernel waits first, since its output is scratch memory that earlier kernels read, and
permits its dependents to start at once after.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.cuda_programs import CudaKernel, compile_kernel, has_compiler, launch_kernel
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel
from drift_sdk._kernels.quantised.packing import (
    STEP,
    TILE,
    UNIT,
    PackedWeight,
)

FILES = ("launch/types.cu", "launch/dependent_launch.cu", "quantised/formats.cu", "launch/hopper.cu")
"""What the programs begin with."""
SCALES = {torch.float32: "GROUP_FLOAT32", torch.bfloat16: "GROUP_BFLOAT16", torch.float16: "GROUP_FLOAT16"}


def has_programs(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the programs take a weight, for numbers of `dtype` beside it."""
    return weight.inner % UNIT == 0 and programs_run(weight.codes.device, dtype)


def programs_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the programs run on a device, for numbers of `dtype` beside the weights."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False

    return torch.cuda.get_device_capability(device) == (9, 0) and has_compiler()


def program(
    weight: PackedWeight, files: tuple[str, ...], name: str, function: str, more: str, **macros: int
) -> CudaKernel:
    """A kernel for a weight's format.

    files: behind FILES. name: of the kernel. function: the macro that stands for a function, of the same
    name in lower case, with its template arguments: the format, then `more`. macros: numbers.
    """
    scales = "CHANNEL" if weight.scales is None else SCALES[weight.scales.dtype]
    shifts = "ZEROS" if weight.zeros is not None else "NO_SHIFTS" if weight.offsets is None else "OFFSETS"
    num_groups = STEP // weight.group_size
    arguments = f"{weight.code_type.upper()}, {scales}, {shifts}, {num_groups}, {more}"
    return CudaKernel(
        (*FILES, *files),
        name,
        (
            (function, f"{function.lower()}<{arguments}>"),
            *((key, str(value)) for key, value in macros.items()),
        ),
    )


TILE_N = 32
TILE_K = 128
NUM_WARPS = 4
THREADS = 128
WARP_UNITS = 4
"""Units of 64 columns that a warp of dequantise.cu converts."""

ACCESS = KernelAccess(frozenset(), frozenset({"out"}), False)
"""dequantise.cu reads nothing before it waits, and writes its output."""

E4M3_FACTOR = tl.constexpr(2.0**120)
"""The factor for the bits of an e4m3 number, moved to their places in bfloat16."""
E2M1_FACTOR = tl.constexpr(2.0**126)
"""The same for an e2m1 number."""


@device_function
def packed_codes(
    codes_ptr,  # uint8, as packing.py arranges them
    packed_row,  # [TILE_N, 1]
    inner,  # [1, TILE_K]
    is_code,  # [TILE_N, TILE_K]
    NUM_UNITS: tl.constexpr,  # units of 64 columns of a row
    CODES: tl.constexpr,  # as PackedWeight.code_type
):
    """Return the codes of some rows and columns, int32 [TILE_N, TILE_K]."""
    lane = packed_row % 8 * 4 + inner % 8 // 2
    half_row, half, sixteen = packed_row % 16 // 8, inner % 16 // 8, inner % 32 // 16
    unit = (packed_row // 64).to(tl.int64) * NUM_UNITS + inner // 64
    tile = unit * 4 + packed_row % 64 // 16
    if CODES == "e4m3" or CODES == "int8":
        chunk = tile * 2 + inner % 64 // 32
        offset = lane * 16 + half_row * 8 + sixteen * 4 + inner % 2 * 2 + half
        return tl.load(codes_ptr + chunk * 512 + offset, mask=is_code, other=0).to(tl.int32)
    else:
        offset = lane * 16 + half_row * 8 + inner % 64 // 32 * 4 + inner % 2 * 2 + sixteen
        byte = tl.load(codes_ptr + tile * 512 + offset, mask=is_code, other=0)
        return (byte.to(tl.int32) >> (half * 4)) & 15


@device_function
def packed_numbers(
    codes,  # int32 [TILE_N, TILE_K]
    zeros,  # fp32 [TILE_N, 1]
    DTYPE: tl.constexpr,  # the storage type
    CODES: tl.constexpr,
):
    """Return what the codes stand for, without scales and offsets, exactly in the storage type."""
    if CODES == "int8":
        return ((codes ^ 128) - 128).to(tl.float32).to(DTYPE)
    elif CODES == "e4m3":
        bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * E4M3_FACTOR).to(DTYPE)
    elif CODES == "e2m1":
        bits = ((codes & 8) << 28) | ((codes & 7) << 22)
        return (bits.to(tl.float32, bitcast=True) * E2M1_FACTOR).to(DTYPE)
    else:
        return (codes.to(tl.float32) - zeros).to(DTYPE)


@device_function
def packed_zeros(
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    place,  # of a scale, int64
    is_place,
    ZERO_POINT: tl.constexpr,  # where there are none
):
    """Return the zero points of 4-bit codes at some places of scales, fp32."""
    zeros = tl.full(place.shape, ZERO_POINT, tl.float32)
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + place, mask=is_place, other=-0.125).to(tl.float32) * -64.0
    return zeros


@device_function
def natural_column(packed_row, N: tl.constexpr, IS_GATED: tl.constexpr):
    """Return the rows of the weight that packed rows are."""
    if IS_GATED:
        return packed_row // 16 * 8 + packed_row % 8 + packed_row % 16 // 8 * (N // 2)
    else:
        return packed_row


@device_function
def scale_place(
    packed_row,
    group,
    NUM_GROUPS: tl.constexpr,  # of a row
):
    """Return the places of the scales of some packed rows and groups, int64."""
    place = (packed_row // 64).to(tl.int64) * NUM_GROUPS + group
    return place * 64 + packed_row % 64 // 16 * 16 + packed_row % 8 * 2 + packed_row % 16 // 8


@kernel
def _dequantise(
    codes_ptr,  # uint8, as packing.py arranges them
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [N], in the order of packed rows, or None
    out_ptr,  # [N, K], storage type
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, k): one tile of the weight."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    NUM_UNITS: tl.constexpr = (K + 63) // 64
    packed_row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)[:, None]
    inner = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)[None, :]
    is_code = (packed_row < N) & (inner < K)
    codes = packed_codes(codes_ptr, packed_row, inner, is_code, NUM_UNITS, CODES)
    place = scale_place(packed_row, inner // GROUP_SIZE, NUM_UNITS * 64 // GROUP_SIZE)
    zeros = packed_zeros(zeros_ptr, place, is_code, ZERO_POINT)
    numbers = packed_numbers(codes, zeros, tl.float32, CODES)
    if row_scales_ptr is None:
        scale = tl.load(scales_ptr + place, mask=is_code, other=0.0).to(tl.float32)
    else:
        scale = tl.load(row_scales_ptr + packed_row, mask=packed_row < N, other=0.0)
    numbers *= scale
    if offsets_ptr is not None:
        numbers += tl.load(offsets_ptr + place, mask=is_code, other=0.0).to(tl.float32)
    row = natural_column(packed_row, N, IS_GATED).to(tl.int64)
    tl.store(out_ptr + row * K + inner, numbers.to(out_ptr.dtype.element_ty), mask=is_code)


def dequantise(weight: PackedWeight, out: Tensor) -> None:
    """Fill out [num_columns, inner] with the numbers of a weight, each rounded once to out's type.

    Raises ValueError for another shape, or if out is not contiguous.
    """
    check_tensor("out", out, (weight.num_columns, weight.inner), out.dtype)
    if has_programs(weight, out.dtype):
        _launch(weight, out)
        return

    grid = cdiv(weight.num_columns, TILE_N), cdiv(weight.inner, TILE_K)
    _dequantise[grid](
        codes_ptr=weight.codes,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        offsets_ptr=weight.offsets,
        row_scales_ptr=weight.row_scales,
        out_ptr=out,
        N=weight.num_columns,
        K=weight.inner,
        GROUP_SIZE=weight.group_size,
        CODES=weight.code_type,
        ZERO_POINT=weight.zero_point,
        IS_GATED=weight.is_gated,
        TILE_N=TILE_N,
        TILE_K=TILE_K,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # a product is rounded before an offset is added, as in the reference
        **launch_options(),
    )


def _launch(weight: PackedWeight, out: Tensor) -> None:
    is_gated = "true" if weight.is_gated else "false"
    kernel = program(weight, ("quantised/dequantise.cu",), "numbers", "DEQUANTISE", is_gated, THREADS=THREADS)
    num_units = cdiv(weight.inner, UNIT)
    launch_kernel(
        compile_kernel(kernel, out.device.index or 0, 0),
        (cdiv(num_units, THREADS // 32 * WARP_UNITS), cdiv(weight.num_columns, TILE)),
        THREADS,
        0,
        weight.codes,
        weight.scales,
        weight.shifts,
        weight.row_scales,
        out,
        weight.num_columns,
        weight.inner,
    )
    note_kernel("the numbers of a quantised weight", ACCESS, {"out": out})
