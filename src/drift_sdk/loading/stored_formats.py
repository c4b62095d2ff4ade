"""Quantised weights as files store them: FP8, 4-bit codes, NVFP4 and MXFP4.

FP8: e4m3 numbers [out, in] with scales for the tensor, for each row or for each block.

4-bit codes, of AWQ, GPTQ and compressed-tensors: each packs eight codes into an int32. AWQ (gemm) and GPTQ
store [in, out] matrices: AWQ packs neighbouring outputs, interleaved; GPTQ neighbouring inputs.
compressed-tensors stores [out, in], and packs inputs.

NVFP4, of compressed-tensors and ModelOpt: both store codes [out, in / 2] as uint8, the even column of a pair
in the low four bits, scales [out, in / 16] as e4m3, and a scale of the tensor as float32. The latter divides
the others in compressed-tensors (weight_global_scale), and multiplies them in ModelOpt (weight_scale_2).

MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0), by the OCP Microscaling Formats
(MX) Specification 1.0. A byte holds two neighbours of a row, the even one in its low four bits. A number v in
a block of scale s is v * 2 ** (s - 127). Scale 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.tensors import CheckedSource, InPlaceSource, TensorSource
from drift_sdk.quantised.formats import (
    MIDDLE,
    MXFP4_BLOCK,
    NVFP4_GROUP,
    Fp8Weight,
    Int4Weight,
    Nvfp4Weight,
    pack_codes,
    pairs_of_bytes,
)
from drift_sdk.quantised.scheme import Groups, Scheme, join_groups

Shape = tuple[int, int]
"""Rows and columns of a weight."""


class StoredSource(CheckedSource, InPlaceSource, Protocol):
    """An InPlaceSource that knows how tensors are stored."""

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor."""


class StoredTensors(Struct, frozen=True):
    """Tensors whose names begin with a module's: a weight's codes, scales and zero points.

    prefix: the name of the module.
    device: where tensors are read to.

    All methods take the last part of a name. Errors name tensor and file.
    """

    tensors: StoredSource
    prefix: str
    device: torch.device

    def has(self, part: str) -> bool:
        return f"{self.prefix}.{part}" in self.tensors.names()

    def place(self, part: str) -> str:
        """File and name of a tensor, for messages."""
        name = f"{self.prefix}.{part}"
        return f"{self.tensors.file(name)}: tensor {name}"

    def shape(self, part: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ModelLoadError if it is missing."""
        if not self.has(part):
            raise ModelLoadError(f"{self.tensors.location}: tensor {self.prefix}.{part} is missing")

        return self.tensors.shape(f"{self.prefix}.{part}")

    def matrix_shape(self, part: str) -> tuple[int, int]:
        """The shape of a tensor of two dimensions. Raises ModelLoadError for more, fewer or empty ones."""
        found = self.shape(part)
        if len(found) != 2 or 0 in found:
            raise ModelLoadError(f"{self.place(part)} has shape {list(found)}, expected a matrix")

        return found[0], found[1]

    def dtype(self, part: str) -> torch.dtype:
        return self.tensors.dtype(f"{self.prefix}.{part}")

    def check(
        self, part: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
    ) -> tuple[int, ...]:
        """The shape of a tensor. Raises ModelLoadError if it is missing, or has none of these shapes or
        dtypes."""
        found = self.shape(part)
        if found not in shapes:
            expected = " or ".join(str(list(each)) for each in dict.fromkeys(shapes))
            raise ModelLoadError(f"{self.place(part)} has shape {list(found)}, expected {expected}")

        dtype = self.dtype(part)
        if dtype not in dtypes:
            names = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise ModelLoadError(f"{self.place(part)} is stored as {dtype}, expected {names}")

        return found

    def read(self, part: str) -> torch.Tensor:
        """A copy of a tensor as stored."""
        # In memory of its own, not through a mapping of the file: see SafetensorsFolder.read_into.
        tensor = torch.empty(self.shape(part), dtype=self.dtype(part), device=self.device)
        self.tensors.read_into(f"{self.prefix}.{part}", tensor)
        return tensor

    def read_finite(self, part: str) -> torch.Tensor:
        """A copy of a tensor of floating-point numbers. Raises ModelLoadError for NaN and infinity."""
        tensor = self.read(part)
        if not tensor.to(torch.float32).isfinite().all():
            raise ModelLoadError(f"{self.place(part)} has NaN or infinity, expected finite numbers")

        return tensor


FP8_SCALES = ("weight_scale_inv", "weight_scale")
FP8_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def fp8_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight."""
    return stored.matrix_shape("weight")


def fp8_bytes(stored: StoredTensors, shape: Shape, scheme: Scheme) -> int:
    """Bytes that a weight takes. Raises ModelLoadError unless the headers of all its tensors are as the
    scheme says."""
    (rows, columns), (height, width) = shape, _check_fp8(stored, shape, scheme)
    return rows * columns + 4 * -(-rows // height) * -(-columns // width)


def read_fp8(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Fp8Weight:
    """A weight: `weight`, and its scales in one of FP8_SCALES. One scale becomes one of each row."""
    (rows, columns), (height, width) = shape, _check_fp8(stored, shape, scheme)
    scales = stored.read_finite(_scale_part(stored, scheme)).to(torch.float32)
    counts = -(-rows // height), -(-columns // width)
    scales = scales.reshape(1, 1).expand(counts) if scales.numel() == 1 else scales.reshape(counts)
    return Fp8Weight(stored.read("weight"), scales.contiguous(), (height, width))


def _check_fp8(stored: StoredTensors, shape: Shape, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of the weight that share a scale in memory."""
    rows, columns = shape
    stored.check("weight", [shape], (torch.float8_e4m3fn,))
    part, allowed = _scale_part(stored, scheme), _allowed_shapes(rows, columns, scheme)
    found = stored.check(part, [shape for shape, _ in allowed], FP8_SCALE_DTYPES)
    fitting = [block for shape, block in allowed if shape == found]
    if len({(min(height, rows), width) for height, width in fitting}) > 1:
        sizes = " and of ".join(f"{height}x{width}" for height, width in fitting)
        raise ModelLoadError(f"{stored.place(part)} fits blocks of {sizes}")

    return (1, columns) if torch.Size(found).numel() == 1 else fitting[0]


def _allowed_shapes(rows: int, columns: int, scheme: Scheme) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """The shapes that scales may have, each with the rows and columns that share a scale."""
    allowed: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    if "tensor" in scheme.scale_shapes:
        allowed += [(shape, (rows, columns)) for shape in ((1,), (), (1, 1))]
    if "channel" in scheme.scale_shapes:
        allowed += [(shape, (1, columns)) for shape in ((rows, 1), (rows,))]
    for height, width in scheme.blocks:
        block = height, min(width, columns)
        allowed.append(((-(-rows // block[0]), -(-columns // block[1])), block))
    return allowed


def _scale_part(stored: StoredTensors, scheme: Scheme) -> str:
    """The last part of the name of the scales, also if they are missing."""
    found = [part for part in FP8_SCALES if stored.has(part)]
    if len(found) > 1:
        raise ModelLoadError(f"{stored.place(found[0])} is beside {found[1]}, expected one of them")

    usual = FP8_SCALES[0] if scheme.name == "fp8" and scheme.blocks else FP8_SCALES[1]
    return found[0] if found else usual


CODES_OF_WORD = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, in fours of bits from the lowest on, of each of eight neighbouring outputs."""
INT4_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
    found = stored.check(part, shapes, INT4_SCALE_DTYPES)
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


COMPRESSED = "weight_packed", "weight_global_scale"
MODELOPT = "weight", "weight_scale_2"
"""Names of the codes and of the scale of the tensor."""


def compressed_nvfp4_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of compressed-tensors."""
    rows, num_bytes = stored.matrix_shape("weight_packed")
    return rows, 2 * num_bytes


def modelopt_nvfp4_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of ModelOpt."""
    rows, num_bytes = stored.matrix_shape("weight")
    return rows, 2 * num_bytes


def compressed_nvfp4_bytes(stored: StoredTensors, shape: Shape, _: Scheme) -> int:
    """Bytes that a weight of compressed-tensors takes. Raises ModelLoadError unless the headers of all its
    tensors are as they have to be."""
    return _check_nvfp4(stored, shape, *COMPRESSED)


def modelopt_nvfp4_bytes(stored: StoredTensors, shape: Shape, _: Scheme) -> int:
    """The same of a weight of ModelOpt."""
    return _check_nvfp4(stored, shape, *MODELOPT)


def read_compressed_nvfp4(stored: StoredTensors, shape: Shape, _: Scheme) -> Nvfp4Weight:
    """A weight of compressed-tensors: weight_packed, weight_scale and weight_global_scale."""
    return _read_nvfp4(stored, shape, *COMPRESSED, is_divided=True)


def read_modelopt_nvfp4(stored: StoredTensors, shape: Shape, _: Scheme) -> Nvfp4Weight:
    """A weight of ModelOpt: weight, weight_scale and weight_scale_2."""
    return _read_nvfp4(stored, shape, *MODELOPT, is_divided=False)


def _check_nvfp4(stored: StoredTensors, shape: Shape, codes: str, global_scale: str) -> int:
    rows, num_bytes = shape[0], shape[1] // 2
    num_groups = -(-shape[1] // NVFP4_GROUP)
    stored.check(codes, [(rows, num_bytes)], (torch.uint8,))
    stored.check("weight_scale", [(rows, num_groups)], (torch.float8_e4m3fn,))
    stored.check(global_scale, [(1,), ()], (torch.float32,))
    return rows * (num_bytes + num_groups + 4)


def _read_nvfp4(
    stored: StoredTensors, shape: Shape, codes: str, global_scale: str, *, is_divided: bool
) -> Nvfp4Weight:
    _check_nvfp4(stored, shape, codes, global_scale)
    scale = stored.read(global_scale).reshape(1)
    if not 0 < scale.item() < float("inf"):
        raise ModelLoadError(
            f"{stored.place(global_scale)} has {scale.item():g}, expected a positive finite number"
        )

    scales = stored.read_finite("weight_scale")
    return Nvfp4Weight(stored.read(codes), scales, scale.expand(shape[0]).contiguous(), is_divided)


BLOCK_BYTES = MXFP4_BLOCK // 2
MAX_SCALE = 252
"""The largest scale of which every number is finite in float32 and bfloat16: 6 * 2 ** 125 < 2 ** 128."""

SCALE_BIAS = 127
"""The scale of a factor of 1."""
NAN_SCALE = 255


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of rows of blocks, in order: [..., G * 32] of `dtype`, on the blocks' device.

    blocks: [..., G, 16] uint8. scales: [..., G] uint8.

    Exact in float32 and bfloat16, up to scales of MAX_SCALE. Beyond them, large numbers become infinite.
    """
    pairs, factors = pairs_of_bytes(dtype, blocks.device), _factors(dtype, blocks.device)
    numbers = pairs[blocks.int()].flatten(-2)  # [..., G, 32]
    return numbers.mul_(factors[scales.int()][..., None]).flatten(-2)


def _factors(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The power of two of each scale: [256]."""
    exponents = torch.arange(256, dtype=torch.float64, device="cpu") - SCALE_BIAS
    factors = torch.exp2(exponents)
    factors[NAN_SCALE] = float("nan")
    return factors.to(dtype).to(device)


class ScaleCheck:
    """Finds tensors of scales above MAX_SCALE, whose numbers may not be finite.

    Each tensor is reduced on its device when it is added; the results are read back once, by `finish`.
    """

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors
        self._names: list[str] = []
        self._largest: list[torch.Tensor] = []

    def add(self, name: str, scales: torch.Tensor) -> None:
        """Check a tensor of scales, without waiting for the result. All tensors have one device."""
        if scales.numel() and not scales.is_meta:
            self._names.append(name)
            self._largest.append(scales.amax())

    def finish(self) -> None:
        """Raise ModelLoadError naming the first tensor with a scale above MAX_SCALE, and its file."""
        largest = torch.stack(self._largest).tolist() if self._largest else []
        for name, scale in zip(self._names, largest, strict=True):
            if scale > MAX_SCALE:
                raise ModelLoadError(
                    f"{self._tensors.file(name)}: tensor {name} has the scale {scale}, expected at most "
                    f"{MAX_SCALE}: numbers of larger scales are not finite"
                )
