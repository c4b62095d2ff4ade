"""Quantised weights as the kernels read them: codes in the order of MMA fragments, scales by group.

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
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.slices import num_slices, slice_size
from drift_sdk._kernels.launch.arguments import check_range, check_tensor

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
