"""Quantised weights as the kernels read them, codes in the order of MMA fragments, and back to numbers.

A weight [N, K] is cut into panels of 64 rows, and those into units of 64 columns, which follow one another:
what a warpgroup reads of a step of columns is one piece of memory. A unit has four tiles of 16 rows, one for
each warp, of one chunk (codes of 4 bits), or two of 32 columns each (of a byte). A chunk is 512 bytes, 16 for
each lane, which reads them at once. Lane 4 g + t has rows g and g + 8, and of every 16 columns, columns 2 t,
2 t + 1, 2 t + 8 and 2 t + 9, as an MMA takes them:

    e4m3, int8: a word for each row and 16 columns: row g twice, then row g + 8. The order of its columns is
                2 t, 2 t + 8, 2 t + 1, 2 t + 9: two neighbours are in bytes 0 and 2, or 1 and 3.
    int4, e2m1: a word for each row and 32 columns: row g twice, then row g + 8. The order of its columns,
                from the low bits on, is 2 t, 2 t + 8, both of the next 16 columns, and the neighbours of
                these four.

A tile of a gated weight has 8 rows of the gate, then the same 8 rows of up, so that a lane has both.

Scales of groups: [panels, groups, 4, 8, 2], of four tiles with rows g and g + 8. Groups have 128, 64, 32 or
16 columns and do not cross the borders of slices (gemm/slices.py); a scale of more columns is repeated. Zero
points z are kept as the bfloat16 number -z / 64, because a kernel's numbers are codes divided by 64. Offsets
are added to a group's numbers, times the sum of its columns of x.

The way back to numbers, of a whole weight and of the parts of it that Triton kernels need:

    dequantise:  out[n, k] = (code[n, k] - zero) * scale, rounded once to the storage type

dequantise.cu does it for bfloat16 on GPUs of compute capability 9.0; elsewhere the kernel of this file, with
the same bits. Grid of the latter: (tiles of TILE_N packed rows, tiles of TILE_K columns).

Bytes: the codes and scales once, and the output.

Dependent launch: the kernel waits first, since its output is scratch memory that earlier kernels read, and
permits its dependents to start at once after.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.slices import num_slices, slice_size
from drift_sdk._kernels.launch.arguments import cdiv, check_range, check_tensor
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

CodeType = Literal["e4m3", "int8", "int4", "e2m1"]
BYTE_CODES: tuple[CodeType, ...] = ("e4m3", "int8")
"""Codes of a byte; the others have four bits."""

TILE = 16
"""Rows of a tile."""
PANEL = 64
"""Rows of a panel, four tiles."""
UNIT = 64
"""Columns of a unit; of every slice but a ragged last one a divisor."""
STEP = 128
"""Columns whose sum a kernel completes before it adds it to the others."""
MIN_GROUP = 16
"""Columns of the smallest group, those of an MMA, of which the size of every group is a multiple."""
CODE_UNIT = 64
"""A zero point is kept divided by this."""
INT4_ZERO = 8
"""The code of zero in a 4-bit weight without zero points."""


class PackedWeight(Struct, frozen=True, kw_only=True):
    """A quantised weight [num_columns, inner], as the kernels take it.

    codes: uint8 [panels, bytes of a panel]. Rows and columns that do not exist have zeros.
    scales: [panels, groups, 4, 8, 2] float32, bfloat16 or float16; None: one scale a row.
    zeros: bfloat16, of the shape of `scales`: -zero point / CODE_UNIT. None: it is INT4_ZERO for int4 without
    offsets, else 0.
    offsets: of the shape and type of `scales`, added to the numbers; None: there are none.
    row_scales: [num_columns] float32, in the order of packed rows; None: scales are those of groups.
    group_size: columns of a group: 128, 64, 32 or 16; 128 with row_scales.
    is_gated: the first half of the rows are those of a gate. num_slices: as in gemm/slices.py.
    """

    code_type: CodeType
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    offsets: Tensor | None
    row_scales: Tensor | None
    num_columns: int
    inner: int
    group_size: int
    is_gated: bool
    num_slices: int

    @property
    def num_panels(self) -> int:
        return self.codes.shape[0]

    @property
    def slice_size(self) -> int:
        """Columns of every slice but the last, which has the rest of `inner`."""
        return slice_size(self.inner, self.num_slices)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def zero_point(self) -> int:
        """The code of zero where there are no zero points."""
        return INT4_ZERO if self.code_type == "int4" and self.offsets is None else 0

    @property
    def shifts(self) -> Tensor | None:
        """Zero points or offsets, of which a weight has one kind at most."""
        return self.offsets if self.zeros is None else self.zeros

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        tensors = (self.codes, self.scales, self.zeros, self.offsets, self.row_scales)
        return tuple(tensor for tensor in tensors if tensor is not None)


def can_pack(num_columns: int, group_size: int, inner: int, *, is_gated: bool = False) -> bool:
    """Whether a weight [num_columns, inner] with groups of `group_size` columns can be arranged."""
    is_group = group_size % MIN_GROUP == 0 or group_size >= inner
    return is_group and inner % UNIT == 0 and not (is_gated and num_columns % TILE)


def pack_weight(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    code_type: CodeType,
    *,
    group_size: int | None,
    offsets: Tensor | None = None,
    is_gated: bool = False,
    is_whole: bool = False,
) -> PackedWeight:
    """Arrange a weight [N, K]: row n, column k stands for (code - zero) * scale + offset.

    codes: [N, K] uint8, one code a byte: bits of e4m3 or int8, 0 to 15, or four bits of e2m1.
    scales: [N, groups] float32, bfloat16 or float16, for groups of `group_size` columns, the last one of the
    rest; [N, 1] for group_size None, one group that has all columns.
    zeros: of the shape of scales, whole numbers from 0 to 16 of any type, for int4 alone. None: 8 for int4
    without offsets, else 0.
    offsets: of the shape and type of scales, of groups; not beside zeros.
    is_gated: the first half of the rows is a gate, the second half its values. is_whole: as in
    gemm/slices.py.

    Raises ValueError for another shape or type, for group_size other than a multiple of 16, and for a gate
    whose rows are no multiple of 8.
    """
    num_columns, inner = codes.shape
    check_tensor("codes", codes, (num_columns, inner), torch.uint8)
    check_range("group_size", group_size or MIN_GROUP, MIN_GROUP)
    if (group_size or 0) % MIN_GROUP:
        raise ValueError(f"group_size={group_size}: expected a multiple of {MIN_GROUP}")
    num_groups = 1 if group_size is None else -(-inner // group_size)
    check_tensor("scales", scales, (num_columns, num_groups), scales.dtype)
    if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"scales: {scales.dtype}: expected float32, bfloat16 or float16")
    if zeros is not None:
        check_tensor("zeros", zeros, (num_columns, num_groups), zeros.dtype)
        if code_type != "int4" or offsets is not None:
            beside = code_type if code_type != "int4" else "a weight with offsets"
            raise ValueError(f"zeros: given for {beside}: expected None")
    if offsets is not None:
        check_tensor("offsets", offsets, (num_columns, num_groups), scales.dtype)
    if is_gated and num_columns % TILE:
        raise ValueError(f"codes: {num_columns} rows of a gated weight: expected a multiple of {TILE}")

    slices = num_slices(num_columns, inner, is_whole=is_whole or is_gated)
    is_by_row = group_size is None and zeros is None and offsets is None
    padded_columns = -(-inner // UNIT) * UNIT
    size = math.gcd(STEP, slice_size(inner, slices), padded_columns, group_size or STEP)
    place = torch.arange(padded_columns // size, device=codes.device) * size
    group = (place // (group_size or inner)).clamp_(max=num_groups - 1)
    order = row_order(num_columns, is_gated, codes.device)
    pack = _pack_bytes if code_type in BYTE_CODES else _pack_nibbles
    return PackedWeight(
        code_type=code_type,
        codes=pack(_padded(codes[order], padded_columns)),
        scales=None if is_by_row else _by_group(scales[order][:, group]),
        zeros=None if zeros is None else _by_group(zeros[order][:, group].to(torch.bfloat16) / -CODE_UNIT),
        offsets=None if offsets is None else _by_group(offsets[order][:, group]),
        row_scales=scales[order, 0].to(torch.float32) if is_by_row else None,
        num_columns=num_columns,
        inner=inner,
        group_size=STEP if is_by_row else size,
        is_gated=is_gated,
        num_slices=slices,
    )


def row_order(num_columns: int, is_gated: bool, device: torch.device) -> Tensor:
    """The rows of the weight in the order of packed rows."""
    row = torch.arange(num_columns, device=device)
    return row.view(2, -1, 8).transpose(0, 1).flatten() if is_gated else row


def _padded(rows: Tensor, num_columns: int | None = None) -> Tensor:
    """[panels, 4, 2, 8, columns] of rows [N, columns], with zeros for those that do not exist."""
    missing = -rows.shape[0] % PANEL
    more_columns = 0 if num_columns is None else num_columns - rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, more_columns, 0, missing))
    return padded.view(-1, PANEL // TILE, 2, TILE // 2, padded.shape[1])


def _pack_bytes(codes: Tensor) -> Tensor:
    """[panels, bytes] of codes [panels, 4, 2, 8, K]."""
    # (panel, tile, half of its rows, g, unit, chunk, 16 columns, half of those, t, neighbour)
    parts = codes.view(*codes.shape[:4], -1, 2, 2, 2, 4, 2)
    return parts.permute(0, 4, 1, 5, 3, 8, 2, 6, 9, 7).reshape(len(codes), -1).contiguous()


def _pack_nibbles(codes: Tensor) -> Tensor:
    """[panels, bytes] of codes [panels, 4, 2, 8, K]."""
    # (panel, tile, half of its rows, g, unit, 32 columns, 16 columns, half of those, t, neighbour)
    parts = codes.view(*codes.shape[:4], -1, 2, 2, 2, 4, 2)
    pairs = parts[:, :, :, :, :, :, :, 0] | (parts[:, :, :, :, :, :, :, 1] << 4)
    return pairs.permute(0, 4, 1, 3, 7, 2, 5, 8, 6).reshape(len(codes), -1).contiguous()


def _by_group(values: Tensor) -> Tensor:
    """[panels, groups, 4, 8, 2] of values [N, groups]."""
    return _padded(values).permute(0, 4, 1, 3, 2).contiguous()


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
