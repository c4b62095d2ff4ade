"""Weights of 4-bit codes in the packings of AWQ, GPTQ and compressed-tensors.

Each packs eight codes into an int32. AWQ (gemm) and GPTQ store [in, out] matrices: AWQ packs neighbouring
outputs, interleaved; GPTQ neighbouring inputs. compressed-tensors stores [out, in], and packs inputs.
"""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.stored_tensors import Shape, StoredTensors
from drift_sdk.quantised.int4 import MIDDLE, Int4Weight, pack_codes
from drift_sdk.quantised.scheme import Groups, Scheme, join_groups

__all__ = [
    "awq_bytes",
    "awq_shape",
    "gptq_bytes",
    "gptq_shape",
    "packed_bytes",
    "packed_shape",
    "read_awq",
    "read_gptq",
    "read_packed",
]

CODES_OF_WORD = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, in fours of bits from the lowest on, of each of eight neighbouring outputs."""
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def awq_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of AWQ."""
    columns, words = stored.matrix_shape("qweight")
    return CODES_OF_WORD * words, columns


def gptq_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of GPTQ."""
    words, rows = stored.matrix_shape("qweight")
    return rows, CODES_OF_WORD * words


def packed_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of compressed-tensors. Raises ModelLoadError for an odd number of columns,
    and for a weight_shape that contradicts weight_packed."""
    rows, words = stored.matrix_shape("weight_packed")
    columns = CODES_OF_WORD * words
    if stored.has("weight_shape"):
        stored.check("weight_shape", [(2,)], (torch.int64, torch.int32))
        found = stored.read("weight_shape").tolist()
        if found[0] != rows or not columns - CODES_OF_WORD < found[1] <= columns or found[1] % 2:
            raise ModelLoadError(
                f"{stored.place('weight_shape')} is {found}, expected [{rows}, {columns}], or 2, 4 or 6 "
                "columns less"
            )

        columns = found[1]
    return rows, columns


def awq_bytes(stored: StoredTensors, shape: Shape, scheme: Scheme) -> int:
    """Most bytes that a weight of AWQ takes. Raises ModelLoadError unless the headers of all its tensors are
    as the scheme says."""
    return _num_bytes(stored, "scales", shape, _awq_groups(stored, shape, scheme))


def gptq_bytes(stored: StoredTensors, shape: Shape, scheme: Scheme) -> int:
    """Most bytes that a weight of GPTQ takes, as `awq_bytes`."""
    return _num_bytes(stored, "scales", shape, _gptq_groups(stored, shape, scheme))


def packed_bytes(stored: StoredTensors, shape: Shape, scheme: Scheme) -> int:
    """Most bytes that a weight of compressed-tensors takes, as `awq_bytes`."""
    return _num_bytes(stored, "weight_scale", shape, _packed_groups(stored, shape, scheme))


def read_awq(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Int4Weight:
    """A weight in AWQ's gemm packing: qweight [in, out / 8], qzeros [groups, out / 8] and scales
    [groups, out]."""
    groups = _awq_groups(stored, shape, scheme)
    codes = pack_codes(_unpack(stored.read("qweight"), AWQ_PLACES).T)
    scales = stored.read_finite("scales").T.contiguous()
    zeros = _unpack(stored.read("qzeros"), AWQ_PLACES).T
    return _weight(codes, scales, groups, zeros, stored.place("qzeros"))


def read_gptq(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Int4Weight:
    """A weight in GPTQ's packing: qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out], and
    perhaps g_idx [in], the group of each input.

    In the first format, zero points are stored minus 1. There is no stored number for a zero point of 0:
    readers disagree about 15, which is rejected.
    """
    groups = _gptq_groups(stored, shape, scheme)
    rows, columns = shape
    zeros = _unpack(stored.read("qzeros"))[:, :rows] + scheme.stored_offset
    if (zeros >= 2 * MIDDLE).any():
        raise ModelLoadError(
            f"{stored.place('qzeros')} has the zero point 15 of checkpoint_format='gptq', which readers take "
            "for 0 or for 16: expected 0 to 14, or checkpoint_format='gptq_v2'"
        )

    if stored.has("g_idx"):
        found = stored.read("g_idx")
        expected = torch.arange(columns, device=found.device) // _size(groups, columns)
        if not torch.equal(found, expected.to(found.dtype)):
            raise ModelLoadError(
                f"{stored.place('g_idx')} reorders the columns (desc_act), which is not implemented"
            )

    codes = _transposed(stored.read("qweight")).view(torch.uint8)
    scales = stored.read_finite("scales").T.contiguous()
    return _weight(codes, scales, groups, zeros.T, stored.place("qzeros"))


def read_packed(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Int4Weight:
    """A weight of compressed-tensors: weight_packed [out, ceil(in / 8)], weight_scale [out, groups], and
    perhaps weight_zero_point, [ceil(out / 8), groups] int32 or [out, groups] int8.

    Codes and zero points are stored plus 8.
    """
    groups = _packed_groups(stored, shape, scheme)
    rows, columns = shape
    codes = stored.read("weight_packed").view(torch.uint8)[:, : columns // 2].contiguous()
    scales = stored.read_finite("weight_scale")
    if not stored.has("weight_zero_point"):
        return Int4Weight(codes, scales, None, _size(groups, columns))

    zeros = stored.read("weight_zero_point")
    if zeros.dtype == torch.int32:
        zeros = _unpack(_transposed(zeros))[:, :rows].T
    else:
        zeros = zeros + MIDDLE
        if ((zeros < 0) | (zeros >= 2 * MIDDLE)).any():
            raise ModelLoadError(
                f"{stored.place('weight_zero_point')} is not within its range: expected -8 to 7"
            )

    return _weight(codes, scales, groups, zeros, stored.place("weight_zero_point"))


def _awq_groups(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Groups:
    """The groups of a weight of AWQ, whose headers are checked."""
    rows, columns = shape
    stored.check("qweight", [(columns, rows // CODES_OF_WORD)], (torch.int32,))
    num_groups, groups = _groups(stored, "scales", shape, scheme, is_transposed=True)
    stored.check("qzeros", [(num_groups, rows // CODES_OF_WORD)], (torch.int32,))
    return groups


def _gptq_groups(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Groups:
    """The groups of a weight of GPTQ, whose headers are checked."""
    rows, columns = shape
    stored.check("qweight", [(columns // CODES_OF_WORD, rows)], (torch.int32,))
    num_groups, groups = _groups(stored, "scales", shape, scheme, is_transposed=True)
    stored.check("qzeros", [(num_groups, -(-rows // CODES_OF_WORD))], (torch.int32,))
    if stored.has("g_idx"):
        stored.check("g_idx", [(columns,)], (torch.int32, torch.int64))
    return groups


def _packed_groups(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Groups:
    """The groups of a weight of compressed-tensors, whose headers are checked."""
    if stored.has("weight_g_idx"):
        raise ModelLoadError(
            f"{stored.place('weight_g_idx')} reorders the columns (actorder), which is not implemented"
        )

    rows, columns = shape
    stored.check("weight_packed", [(rows, -(-columns // CODES_OF_WORD))], (torch.int32,))
    num_groups, groups = _groups(stored, "weight_scale", shape, scheme, is_transposed=False)
    if groups.has_zeros or stored.has("weight_zero_point"):
        is_packed = stored.has("weight_zero_point") and stored.dtype("weight_zero_point") == torch.int32
        zeros_shape = (-(-rows // CODES_OF_WORD) if is_packed else rows), num_groups
        stored.check("weight_zero_point", [zeros_shape], (torch.int32, torch.int8))
    return groups


def _groups(
    stored: StoredTensors, part: str, shape: Shape, scheme: Scheme, *, is_transposed: bool
) -> tuple[int, Groups]:
    """Groups of a row of a weight [out, in], by the shape of its scales: their number, and which of the
    scheme they are. Scales are stored as [out, groups], or transposed. Raises ModelLoadError if several sizes
    fit."""
    rows, columns = shape
    allowed = join_groups(Groups(_size(each, columns), each.has_zeros) for each in scheme.groups)
    nums = [-(-columns // _size(each, columns)) for each in allowed]
    shapes = [(num, rows) if is_transposed else (rows, num) for num in nums]
    found = stored.check(part, shapes, SCALE_DTYPES)
    fitting = [each for each, expected in zip(allowed, shapes, strict=True) if expected == found]
    if len(fitting) > 1:
        first, second, *_ = sorted(_size(each, columns) for each in fitting)
        raise ModelLoadError(f"{stored.place(part)} fits groups of {first} and of {second} columns")

    return found[0 if is_transposed else 1], fitting[0]


def _size(groups: Groups, columns: int) -> int:
    """Columns of a group in rows of so many columns."""
    return columns if groups.size is None else min(groups.size, columns)


def _num_bytes(stored: StoredTensors, part: str, shape: Shape, groups: Groups) -> int:
    """Most bytes of a weight with scales in `part`: where the config does not tell, with zero points."""
    rows, columns = shape
    zero_bytes = 0 if groups.has_zeros is False else 1
    num_scales = torch.Size(stored.shape(part)).numel()
    return rows * columns // 2 + num_scales * (stored.dtype(part).itemsize + zero_bytes)


def _weight(
    codes: torch.Tensor, scales: torch.Tensor, groups: Groups, zeros: torch.Tensor, place: str
) -> Int4Weight:
    """The weight; zero points that are all 8 are left out. place: where they are from, for messages."""
    size = _size(groups, 2 * codes.shape[1])
    if not (zeros != MIDDLE).any():
        return Int4Weight(codes, scales, None, size)

    if groups.has_zeros is False:
        raise ModelLoadError(
            f"{place} has zero points other than {MIDDLE}, expected none: quantization_config says that the "
            "weights are symmetric"
        )

    return Int4Weight(codes, scales, zeros.to(torch.uint8).contiguous(), size)


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
