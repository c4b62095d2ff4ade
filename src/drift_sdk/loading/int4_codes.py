"""Weights of 4-bit codes in the packings of AWQ, GPTQ and compressed-tensors.

Each packs eight codes into an int32. AWQ (gemm) and GPTQ store [in, out] matrices: AWQ packs neighbouring
outputs, interleaved; GPTQ neighbouring inputs. compressed-tensors stores [out, in], and packs inputs.
"""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.stored_tensors import StoredTensors
from drift_sdk.quantised.int4 import MIDDLE, Int4Weight, pack_codes
from drift_sdk.quantised.scheme import Scheme

__all__ = ["awq_shape", "gptq_shape", "packed_shape", "read_awq", "read_gptq", "read_packed"]

CODES_OF_WORD = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, in fours of bits from the lowest on, of each of eight neighbouring outputs."""
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def awq_shape(stored: StoredTensors) -> tuple[int, int]:
    """Rows and columns of a weight of AWQ."""
    columns, words = stored.matrix_shape("qweight")
    return CODES_OF_WORD * words, columns


def gptq_shape(stored: StoredTensors) -> tuple[int, int]:
    """Rows and columns of a weight of GPTQ."""
    words, rows = stored.matrix_shape("qweight")
    return rows, CODES_OF_WORD * words


def read_awq(stored: StoredTensors, scheme: Scheme) -> Int4Weight:
    """A weight in AWQ's gemm packing: qweight [in, out / 8], qzeros [groups, out / 8] and scales
    [groups, out]."""
    rows, columns = awq_shape(stored)
    words = rows // CODES_OF_WORD
    scales = _read_scales(stored, "scales", (rows, columns), scheme, is_transposed=True)
    zeros = stored.read("qzeros", (scales.shape[1], words), (torch.int32,))
    codes = stored.read("qweight", (columns, words), (torch.int32,))
    return _weight(
        pack_codes(_unpack(codes, AWQ_PLACES).T),
        scales,
        _unpack(zeros, AWQ_PLACES).T,
        _group_size(stored, "scales", scales, columns, scheme),
    )


def read_gptq(stored: StoredTensors, scheme: Scheme) -> Int4Weight:
    """A weight in GPTQ's packing: qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out], and
    perhaps g_idx [in], the group of each input.

    In the first format, zero points are stored minus 1. There is no stored number for a zero point of 0:
    readers disagree about 15, which is rejected.
    """
    rows, columns = gptq_shape(stored)
    words = columns // CODES_OF_WORD
    scales = _read_scales(stored, "scales", (rows, columns), scheme, is_transposed=True)
    group_size = _group_size(stored, "scales", scales, columns, scheme)
    shape = scales.shape[1], -(-rows // CODES_OF_WORD)
    zeros = _unpack(stored.read("qzeros", shape, (torch.int32,)))[:, :rows] + scheme.stored_offset
    if (zeros >= 2 * MIDDLE).any():
        raise ModelLoadError(
            f"{stored.place('qzeros')} has the zero point 15 of checkpoint_format='gptq', which readers take "
            "for 0 or for 16: expected 0 to 14, or checkpoint_format='gptq_v2'"
        )

    if stored.has("g_idx"):
        groups = stored.read("g_idx", (columns,), (torch.int32, torch.int64))
        if not torch.equal(
            groups, torch.arange(columns, device=groups.device).to(groups.dtype) // group_size
        ):
            raise ModelLoadError(
                f"{stored.place('g_idx')} reorders the columns (desc_act), which is not implemented"
            )

    codes = _transposed(stored.read("qweight", (words, rows), (torch.int32,))).view(torch.uint8)
    return _weight(codes, scales, zeros.T, group_size)


def read_packed(stored: StoredTensors, scheme: Scheme) -> Int4Weight:
    """A weight of compressed-tensors: weight_packed [out, ceil(in / 8)], weight_scale [out, groups], and
    perhaps weight_zero_point, [ceil(out / 8), groups] int32 or [out, groups] int8.

    Codes and zero points are stored plus 8.
    """
    if stored.has("weight_g_idx"):
        raise ModelLoadError(
            f"{stored.place('weight_g_idx')} reorders the columns (actorder), which is not implemented"
        )

    rows, columns = packed_shape(stored)
    words = -(-columns // CODES_OF_WORD)
    scales = _read_scales(stored, "weight_scale", (rows, columns), scheme, is_transposed=False)
    num_groups = scales.shape[1]
    zeros = None
    if stored.has("weight_zero_point"):
        if stored.dtype("weight_zero_point") == torch.int32:
            shape = -(-rows // CODES_OF_WORD), num_groups
            packed = stored.read("weight_zero_point", shape, (torch.int32,))
            zeros = _unpack(_transposed(packed))[:, :rows].T
        else:
            zeros = stored.read("weight_zero_point", (rows, num_groups), (torch.int8,)) + MIDDLE
            if ((zeros < 0) | (zeros >= 2 * MIDDLE)).any():
                raise ModelLoadError(
                    f"{stored.place('weight_zero_point')} is not within its range: expected -8 to 7"
                )

    codes = stored.read("weight_packed", (rows, words), (torch.int32,)).view(torch.uint8)
    return _weight(
        codes[:, : columns // 2].contiguous(),
        scales,
        zeros,
        _group_size(stored, "weight_scale", scales, columns, scheme),
    )


def packed_shape(stored: StoredTensors) -> tuple[int, int]:
    """Rows and columns of a weight of compressed-tensors. Raises ModelLoadError for an odd number of columns,
    and for a weight_shape that contradicts weight_packed."""
    rows, words = stored.matrix_shape("weight_packed")
    columns = CODES_OF_WORD * words
    if stored.has("weight_shape"):
        found = stored.read("weight_shape", (2,), (torch.int64, torch.int32)).tolist()
        if found[0] != rows or not columns - CODES_OF_WORD < found[1] <= columns or found[1] % 2:
            raise ModelLoadError(
                f"{stored.place('weight_shape')} is {found}, expected [{rows}, {columns}], or 2, 4 or 6 "
                "columns less"
            )

        columns = found[1]
    return rows, columns


def _weight(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> Int4Weight:
    """The weight; zero points that are all 8 are left out."""
    if zeros is not None and not (zeros != MIDDLE).any():
        zeros = None
    return Int4Weight(
        codes, scales, None if zeros is None else zeros.to(torch.uint8).contiguous(), group_size
    )


def _read_scales(
    stored: StoredTensors, part: str, shape: tuple[int, int], scheme: Scheme, *, is_transposed: bool
) -> torch.Tensor:
    """Scales [out, groups] of a weight [out, in]. They are stored so, or transposed."""
    rows, columns = shape
    found = stored.shape(part)
    nums = [1 if size is None else -(-columns // size) for size in scheme.group_sizes]
    expected = [(num, rows) if is_transposed else (rows, num) for num in nums]
    if found not in expected:
        lists = " or ".join(str(list(each)) for each in expected)
        raise ModelLoadError(f"{stored.place(part)} has shape {list(found)}, expected {lists}")

    scales = stored.read(part, found, SCALE_DTYPES)
    return scales.T.contiguous() if is_transposed else scales


def _group_size(stored: StoredTensors, part: str, scales: torch.Tensor, columns: int, scheme: Scheme) -> int:
    """The size of the groups; ModelLoadError if several sizes of the scheme fit the scales."""
    num_groups = scales.shape[1]
    sizes = {columns if size is None else min(size, columns) for size in scheme.group_sizes}
    fitting = sorted(size for size in sizes if -(-columns // size) == num_groups)
    if len(fitting) > 1:
        raise ModelLoadError(f"{stored.place(part)} fits groups of {fitting[0]} and of {fitting[1]} columns")

    return fitting[0]


def _transposed(words: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix, row-major also where it has one column: `contiguous` then leaves strides
    with which it cannot be viewed as bytes."""
    return words.T.clone(memory_format=torch.contiguous_format)


def _unpack(words: torch.Tensor, places: tuple[int, ...] = tuple(range(CODES_OF_WORD))) -> torch.Tensor:
    """The codes [M, 8 N] uint8 of words [M, N] int32. places: see AWQ_PLACES."""
    pairs = words.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).view(len(words), -1, CODES_OF_WORD)
    if places != tuple(range(CODES_OF_WORD)):
        codes = codes[:, :, list(places)]
    return codes.reshape(len(words), -1)
