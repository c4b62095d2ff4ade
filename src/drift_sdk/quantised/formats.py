"""Weights of at most eight bits, and their numbers: e4m3, 4-bit integers, NVFP4, the blocks of GGUF files.

e4m3 numbers have a sign, four bits of exponent and three of mantissa. A number of the matrix is
float32(value) * scale, in float32. NaN codes (0x7f, 0xff) are no weights.

4-bit integers have a scale and perhaps a zero point for each group of columns. A number of the matrix is
float32(code - zero) * float32(scale), in float32. Codes are 0 to 15.

NVFP4 has 4-bit floating-point numbers (e2m1: a sign, two bits of exponent and one of mantissa) in groups of
16 columns, with e4m3 scales. A number of the matrix is value * (scale / global) if global scales divide, as
compressed-tensors stores them, and value * (scale * global) if they multiply, as ModelOpt does; all in
float32, rounded after each operation. Quantising chooses each global scale so that the scales of its rows use
the range of e4m3.

A block of a GGUF file is a number of neighbouring columns of a row, with their scales. Layouts are those of
ggml's ggml-common.h; all numbers are little-endian. The formulas, in float32, with q the code, d and m
numbers that are stored in float16, and sums and products rounded one by one:

Q8_0           q * d                       q int8
Q4_0, Q5_0     (q - 8) * d, (q - 16) * d
Q4_1, Q5_1     q * d + m
Q4_K, Q5_K     (d * s) * q - (m * t)       s and t of 6 bits for each 32 columns
Q6_K           (d * s) * (q - 32)          s int8 for each 16 columns
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drift_sdk.quantised.weight import GroupedIntegers, Matrix, QuantisedWeight, StackedWeight

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
"""The largest number of e4m3; the smallest is 2**-9."""


def quantise_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Return the e4m3 numbers next to x / scale, of equally near ones the even one.

    Numbers beyond MAX_E4M3 become MAX_E4M3, and NaN zero. scale: float32, of a shape that broadcasts to that
    of x.
    """
    quotient = x.to(torch.float32) / scale
    return quotient.nan_to_num(nan=0.0).clamp_(-MAX_E4M3, MAX_E4M3).to(E4M3)


@dataclass(frozen=True, slots=True)
class Fp8Weight(QuantisedWeight):
    """A matrix of e4m3 numbers.

    values: [out, in] float8_e4m3fn, row-major.
    scales: [ceil(out / block_rows), ceil(in / block_columns)] float32. Blocks at the end may be cut off.
    block:  rows and columns that share a scale. (1, in): a scale for each row.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        expected = -(-rows // self.block[0]), -(-columns // self.block[1])
        if tuple(self.scales.shape) != expected:
            raise ValueError(f"scales of shape {list(self.scales.shape)}: expected {list(expected)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has one scale."""
        return self.block[0] == 1 and self.scales.shape[1] == 1

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.scales

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        numbers = self.values.to(torch.float32)
        if self.has_row_scales:
            return numbers.mul_(self.scales).to(dtype)

        (rows, columns), (height, width) = self.shape, self.block
        scales = self.scales.repeat_interleave(height, dim=0)[:rows]
        num_whole = columns // width
        whole, rest = numbers[:, : num_whole * width], numbers[:, num_whole * width :]
        whole.unflatten(1, (num_whole, width)).mul_(scales[:, :num_whole, None])
        rest.mul_(scales[:, -1:])
        return numbers.to(dtype)

    def rows(self, index: torch.Tensor) -> Fp8Weight:
        """As in QuantisedWeight. Blocks stay as high as they are if the rows of each come from one block."""
        # Indexing is not implemented for 8-bit floating-point numbers on every device.
        values = self.values.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        height, width = self.block
        blocks = index[::height] // height
        if height > 1 and torch.equal(blocks.repeat_interleave(height)[: len(index)], index // height):
            return Fp8Weight(values, self.scales[blocks], self.block)

        return Fp8Weight(values, self.scales[index // height], (1, width))

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device), self.block)


def join_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """The rows of all parts as one weight; None if their blocks are of different widths.

    Blocks become as low as it takes for none to span two parts.
    """
    if len({part.block[1] for part in parts}) > 1:
        return None

    heights = [size for part in parts for size in (part.block[0], part.shape[0])]
    height = math.gcd(*heights[:-1])  # the last part may end anywhere
    scales = [part.scales.repeat_interleave(part.block[0], dim=0)[: part.shape[0] : height] for part in parts]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(values, torch.cat(scales), (height, parts[0].block[1]))


def quantise_fp8(matrix: torch.Tensor, block: tuple[int, int] | None = None) -> Fp8Weight:
    """A matrix [out, in] of finite numbers with a scale for each block of rows and columns, None: for each
    row. It is the largest magnitude / 448, in float32. Values are number / scale, rounded to the nearest e4m3
    (ties to even). A block of zeros has the scale 1."""
    rows, columns = matrix.shape
    height, width = block or (1, columns)
    counts = -(-rows // height), -(-columns // width)
    wide = matrix.to(torch.float32)
    missing = counts[1] * width - columns, counts[0] * height - rows
    if any(missing):
        wide = torch.nn.functional.pad(wide, (0, missing[0], 0, missing[1]))
    tiles = wide.view(counts[0], height, counts[1], width)
    largest = tiles.abs().amax(dim=(1, 3), keepdim=True)
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / MAX_E4M3)
    # A subnormal quotient may be 0.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    values = (tiles / scales).clamp_(-MAX_E4M3, MAX_E4M3).view(wide.shape)[:rows, :columns]
    values = values.to(torch.float8_e4m3fn).contiguous()
    return Fp8Weight(values, scales.view(counts), (height, width))


MXFP4_BLOCK = 32
"""Numbers of MXFP4 that share a scale."""

MIDDLE = 8
"""The zero point of weights without zero points."""
QUANTISED_GROUP = 128
"""Columns of a group of `quantise_int4`."""


@dataclass(frozen=True, slots=True)
class Int4Weight(QuantisedWeight):
    """A matrix of 4-bit codes.

    codes:      [out, in / 2] uint8, row-major: column 2 j in the low four bits of byte j, 2 j + 1 in the high
                ones.
    scales:     [out, ceil(in / group_size)], float16, bfloat16 or float32.
    zeros:      the same shape, uint8, 0 to 15; None: 8 for all groups.
    group_size: columns of a group; the last group may be shorter.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        rows, columns = self.shape
        expected = rows, -(-columns // self.group_size)
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and tuple(tensor.shape) != expected:
                raise ValueError(f"{name} of shape {list(tensor.shape)}: expected {list(expected)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = self.shape
        numbers = torch.stack((self.codes & 15, self.codes >> 4), dim=2).view(rows, columns)
        wide = F.pad(numbers, (0, -columns % self.group_size)).to(torch.float32)
        groups = wide.view(rows, -1, self.group_size)
        zeros = MIDDLE if self.zeros is None else self.zeros[:, :, None].to(torch.float32)
        groups.sub_(zeros).mul_(self.scales[:, :, None].to(torch.float32))
        return wide[:, :columns].to(dtype).contiguous()

    def rows(self, index: torch.Tensor) -> Int4Weight:
        zeros = None if self.zeros is None else self.zeros[index]
        return Int4Weight(self.codes[index], self.scales[index], zeros, self.group_size)

    def to(self, device: torch.device) -> Int4Weight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return Int4Weight(self.codes.to(device), self.scales.to(device), zeros, self.group_size)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """The codes [out, in] of an Int4Weight as its bytes, [out, in / 2] uint8. The number of columns is
    even."""
    return codes[:, 0::2].to(torch.uint8) | (codes[:, 1::2].to(torch.uint8) << 4)


def join_int4(parts: Sequence[Int4Weight]) -> Int4Weight | None:
    """The rows of all parts as one weight; None if their groups are of different sizes.

    Scales of different dtypes become float32.
    """
    if len({part.group_size for part in parts}) > 1:
        return None

    dtypes = {part.scales.dtype for part in parts}
    scales = torch.cat([part.scales if len(dtypes) == 1 else part.scales.to(torch.float32) for part in parts])
    zeros = None
    if any(part.zeros is not None for part in parts):
        of_parts = [_all_zeros(part) for part in parts]
        zeros = torch.cat(of_parts)
    return Int4Weight(torch.cat([part.codes for part in parts]), scales, zeros, parts[0].group_size)


def quantise_int4(matrix: torch.Tensor) -> Int4Weight:
    """A matrix [out, in] of finite numbers in groups of 128 columns, without zero points. `in` is even.

    The scale of a group is its number of the largest magnitude / -8, rounded to bfloat16, so that this number
    gets the code 0; codes are 8 + number / scale, rounded to the nearest (ties to even), at most 15. A group
    of zeros has the scale 1.
    """
    rows, columns = matrix.shape
    wide = F.pad(matrix.to(torch.float32), (0, -columns % QUANTISED_GROUP)).view(rows, -1, QUANTISED_GROUP)
    extreme = wide.gather(2, wide.abs().argmax(dim=2, keepdim=True))
    scales = (extreme / -MIDDLE).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (wide / scales.to(torch.float32)).round_().add_(MIDDLE).clamp_(0, 15).view(rows, -1)
    return Int4Weight(pack_codes(codes[:, :columns]), scales[:, :, 0].contiguous(), None, QUANTISED_GROUP)


def _all_zeros(part: Int4Weight) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros

    return torch.full(part.scales.shape, MIDDLE, dtype=torch.uint8, device=part.device)


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7. The code's fourth bit is the sign."""
MAX_E2M1 = MAGNITUDES[-1]


def pairs_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, that of its low four bits first: [256, 2]."""
    magnitudes = torch.tensor(MAGNITUDES, dtype=dtype, device="cpu")
    values = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)


def quantise_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The codes of the numbers next to those of a tensor, uint8; of equally near ones the even code.

    Numbers beyond MAX_E2M1 become MAX_E2M1.
    """
    size = x.abs()
    codes = torch.signbit(x).to(torch.uint8) << 3
    for code in range(1, len(MAGNITUDES)):
        bound = (MAGNITUDES[code - 1] + MAGNITUDES[code]) / 2
        codes += size > bound if code % 2 else size >= bound
    return codes


NVFP4_GROUP = 16
"""Columns that share a scale."""
QUANTISED_NUMBERS = 1 << 22
"""Numbers of a matrix that are quantised at a time."""
ROW_SCALE = 256.0
"""The scale of a group with the largest number of a row of `quantise_nvfp4`, if that number becomes 6."""


@dataclass(frozen=True, slots=True)
class Nvfp4Weight(QuantisedWeight):
    """A matrix of e2m1 numbers.

    codes:         [out, in / 2] uint8, row-major: column 2 j in the low four bits of byte j, 2 j + 1 in the
                   high ones.
    scales:        [out, ceil(in / 16)] float8_e4m3fn; the last group may be shorter. NaN codes are no scales.
    global_scales: [out] float32, positive: that of the tensor which the row was stored in.
    is_divided:    scales are divided by global scales; otherwise multiplied.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scales: torch.Tensor
    is_divided: bool

    def __post_init__(self) -> None:
        rows, columns = self.shape
        expected = {"scales": (rows, -(-columns // NVFP4_GROUP)), "global_scales": (rows,)}
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"{name} of shape {list(found)}: expected {list(shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scales, self.global_scales

    def group_scales(self) -> torch.Tensor:
        """The factor of each group, float32 [out, groups]."""
        scales, of_rows = self.scales.to(torch.float32), self.global_scales[:, None]
        return scales.div_(of_rows) if self.is_divided else scales.mul_(of_rows)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        return nvfp4_numbers(self.codes, self.group_scales()).to(dtype)

    def rows(self, index: torch.Tensor) -> Nvfp4Weight:
        # Indexing is not implemented for 8-bit floating-point numbers on every device.
        scales = self.scales.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        return Nvfp4Weight(self.codes[index], scales, self.global_scales[index], self.is_divided)

    def to(self, device: torch.device) -> Nvfp4Weight:
        codes, scales, global_scales = (tensor.to(device) for tensor in self.tensors())
        return Nvfp4Weight(codes, scales, global_scales, self.is_divided)


def nvfp4_numbers(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The numbers of rows of codes [..., n / 2] uint8, float32 [..., n]: value * factor.

    factors: float32 [..., ceil(n / 16)], of each group.
    """
    numbers = pairs_of_bytes(torch.float32, codes.device)[codes.int()].flatten(-2)
    num_whole = numbers.shape[-1] // NVFP4_GROUP
    whole, rest = numbers[..., : num_whole * NVFP4_GROUP], numbers[..., num_whole * NVFP4_GROUP :]
    whole.unflatten(-1, (num_whole, NVFP4_GROUP)).mul_(factors[..., :num_whole, None])
    rest.mul_(factors[..., -1:])
    return numbers


def quantise_groups(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers [..., n] as codes [..., n / 2] uint8 and scales [..., ceil(n / 16)] e4m3, for factors
    scale * global_scale. n is even.

    The scale of a group makes its largest magnitude 6 or 4, the largest numbers of e2m1: that with the lower
    sum of squared errors, 6 if they are equal. Each is rounded to the nearest e4m3, at most 448; codes to the
    nearest e2m1 (ties to even). Numbers that are too large become the largest, and NaN zero.

    global_scale: float32, positive, of a shape that broadcasts to that of x.
    """
    num_columns = x.shape[-1]
    bound = global_scale * (MAX_E2M1 * MAX_E4M3)
    wide = x.to(torch.float32).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    wide = torch.minimum(torch.maximum(wide, -bound), bound)
    groups = F.pad(wide, (0, -num_columns % NVFP4_GROUP)).unflatten(-1, (-1, NVFP4_GROUP))
    units = groups.abs().amax(dim=-1, keepdim=True) / global_scale[..., None]
    six, four = (_quantised(groups, global_scale, units / largest) for largest in (6.0, 4.0))
    is_better = four[2] < six[2]
    codes, scales = (torch.where(is_better, four[part], six[part]) for part in (0, 1))
    return codes.flatten(-2)[..., : num_columns // 2].contiguous(), scales.squeeze(-1).view(E4M3)


def quantise_nvfp4(matrix: torch.Tensor) -> Nvfp4Weight:
    """A matrix [out, in] of finite numbers with the scales of `quantise_groups`. `in` is even.

    The global scale of a row multiplies. It is the row's largest magnitude / (6 * 256), in float32, so that
    no scale exceeds 384. A row of zeros has the global scale 1.
    """
    largest = matrix.abs().amax(dim=1).to(torch.float32)
    global_scales = torch.where(largest == 0, torch.ones_like(largest), largest / (MAX_E2M1 * ROW_SCALE))
    # A subnormal quotient may be 0.
    global_scales = global_scales.clamp(min=torch.finfo(torch.float32).tiny)
    # Rows are quantised some at a time, because that takes many times their memory.
    num_rows = max(1, QUANTISED_NUMBERS // max(1, matrix.shape[1]))
    chunks = zip(matrix.split(num_rows), global_scales[:, None].split(num_rows), strict=True)
    codes, scales = zip(*(quantise_groups(rows, of_rows) for rows, of_rows in chunks), strict=True)
    of_groups = torch.cat([part.view(torch.uint8) for part in scales]).view(E4M3)
    return Nvfp4Weight(torch.cat(codes), of_groups, global_scales, False)


def _quantised(
    groups: torch.Tensor, global_scale: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [..., 8] of groups [..., 16], their scales [..., 1] as bytes, and sums of squared errors
    [..., 1], which are added in an order that depends on no shape."""
    rounded = scales.clamp(max=MAX_E4M3).to(E4M3)
    factors = rounded.to(torch.float32) * global_scale[..., None]
    codes = quantise_e2m1(groups / torch.where(factors == 0, torch.inf, factors))
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    errors = (nvfp4_numbers(packed, factors) - groups).square_()
    for half in (8, 4, 2, 1):
        errors = errors[..., :half] + errors[..., half:]
    return packed, rounded.view(torch.uint8), errors


def join_nvfp4(parts: Sequence[Nvfp4Weight]) -> Nvfp4Weight | None:
    """The rows of all parts as one weight; None if global scales of some divide and of some multiply."""
    if len({part.is_divided for part in parts}) > 1:
        return None

    scales = torch.cat([part.scales.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Nvfp4Weight(
        torch.cat([part.codes for part in parts]),
        scales,
        torch.cat([part.global_scales for part in parts]),
        parts[0].is_divided,
    )


BlockFormat = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

CHUNK_NUMBERS, GPU_CHUNK_NUMBERS = 1 << 18, 1 << 26
"""Numbers that are converted at a time: so few that the intermediate results stay in a CPU's cache, and take
no more than a GiB of a GPU's memory."""


@dataclass(frozen=True, slots=True)
class BlockWeight(QuantisedWeight):
    """A matrix of blocks.

    blocks: [out, in / columns of a block, bytes of a block] uint8, row-major.
    format: see BLOCK_FORMATS.
    """

    blocks: torch.Tensor
    format: BlockFormat

    def __post_init__(self) -> None:
        _, expected = BLOCK_FORMATS[self.format]
        if self.blocks.ndim != 3 or self.blocks.shape[2] != expected:
            raise ValueError(
                f"blocks of shape {list(self.blocks.shape)}: expected {expected} bytes in the last dimension"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] * BLOCK_FORMATS[self.format][0]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.blocks,)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        flat, step = self._flat()
        numbers = flat.new_empty((len(flat), BLOCK_FORMATS[self.format][0]), dtype=dtype)
        for start in range(0, len(flat), step):
            numbers[start : start + step] = INTEGERS[self.format](flat[start : start + step]).numbers()
        return numbers.view(self.shape)

    def integers(self) -> GroupedIntegers:
        flat, step = self._flat()
        parts = [INTEGERS[self.format](flat[start : start + step]) for start in range(0, len(flat), step)]
        offsets = [part.offsets for part in parts if part.offsets is not None]
        rows, columns = self.shape
        return GroupedIntegers(
            torch.cat([part.codes for part in parts]).view(rows, columns),
            torch.cat([part.scales for part in parts]).view(rows, -1),
            torch.cat(offsets).view(rows, -1) if offsets else None,
            parts[0].num_bits,
        )

    def _flat(self) -> tuple[torch.Tensor, int]:
        """All blocks, [blocks, bytes], and how many are converted at a time."""
        flat = self.blocks.view(-1, self.blocks.shape[2])
        num_numbers = CHUNK_NUMBERS if flat.device.type == "cpu" else GPU_CHUNK_NUMBERS
        return flat, num_numbers // BLOCK_FORMATS[self.format][0]

    def rows(self, index: torch.Tensor) -> BlockWeight:
        return BlockWeight(self.blocks[index], self.format)

    def to(self, device: torch.device) -> BlockWeight:
        return BlockWeight(self.blocks.to(device), self.format)


def join_blocks(parts: Sequence[BlockWeight]) -> BlockWeight | None:
    """The rows of all parts as one weight; None if their formats differ."""
    if len({part.format for part in parts}) > 1:
        return None

    return BlockWeight(torch.cat([part.blocks for part in parts]), parts[0].format)


# Functions from blocks [B, bytes] to their integers, a block a row.


def _q8_0(blocks: torch.Tensor) -> GroupedIntegers:
    return GroupedIntegers(blocks[:, 2:].view(torch.int8), _half(blocks, 0), None, 8)


def _q4_0(blocks: torch.Tensor) -> GroupedIntegers:
    return GroupedIntegers(_nibbles(blocks[:, 2:], 16) - 8, _half(blocks, 0), None, 4)


def _q4_1(blocks: torch.Tensor) -> GroupedIntegers:
    return GroupedIntegers(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2), 4)


def _q5_0(blocks: torch.Tensor) -> GroupedIntegers:
    codes = _nibbles(blocks[:, 6:], 16) | (_bits(blocks[:, 2:6]) << 4)
    return GroupedIntegers(codes - 16, _half(blocks, 0), None, 8)


def _q5_1(blocks: torch.Tensor) -> GroupedIntegers:
    codes = _nibbles(blocks[:, 8:], 16) | (_bits(blocks[:, 4:8]) << 4)
    return GroupedIntegers(codes, _half(blocks, 0), _half(blocks, 2), 8)


def _q4_k(blocks: torch.Tensor) -> GroupedIntegers:
    return _scaled_k(blocks, _nibbles(blocks[:, 16:], 32), 4)


def _q5_k(blocks: torch.Tensor) -> GroupedIntegers:
    # Bit s of byte l is the fifth bit of column 32 s + l.
    high = torch.stack([(blocks[:, 16:48] >> group) & 1 for group in range(8)], dim=1).view(torch.int8)
    return _scaled_k(blocks, _nibbles(blocks[:, 48:], 32) | (high.view(-1, 256) << 4), 8)


def _q6_k(blocks: torch.Tensor) -> GroupedIntegers:
    # 64 bytes of low bits and 32 bytes of high bits for each half of the block.
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].view(-1, 2, 32)
    high = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 256).view(torch.int8)
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32) * _half(blocks, 208).to(torch.float32)
    return GroupedIntegers((low | (high << 4)) - 32, scales, None, 8)


def _scaled_k(blocks: torch.Tensor, codes: torch.Tensor, num_bits: int) -> GroupedIntegers:
    """The integers of Q4_K or Q5_K blocks, with codes [B, 256]."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, middle, high = packed[:, 0], packed[:, 1], packed[:, 2]
    # Six bits each: of the first four groups in one byte, of the last four in two.
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    offsets = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    factors = scales.to(torch.float32) * _half(blocks, 0).to(torch.float32)
    shifts = offsets.to(torch.float32) * _half(blocks, 2).to(torch.float32)
    return GroupedIntegers(codes, factors, shifts.neg_(), num_bits)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 number that begins at byte `start` of each block, [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """The codes of bytes [B, n]: the low four bits of `run` bytes, then their high ones, [B, 2 n] int8."""
    grouped = packed.reshape(len(packed), -1, 1, run)
    return torch.cat((grouped & 15, grouped >> 4), dim=2).view(len(packed), -1).view(torch.int8)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of bytes [B, n], the lowest of each byte first, [B, 8 n] int8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).view(len(packed), -1).view(torch.int8)


BLOCK_FORMATS: dict[BlockFormat, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Columns and bytes of a block, by its format."""

INTEGERS: dict[BlockFormat, Callable[[torch.Tensor], GroupedIntegers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def stack_rows(parts: Sequence[Matrix]) -> QuantisedWeight:
    """One weight of the rows of all parts, at least one of which is quantised.

    Parts of one format, with groups or blocks of the same width, become one weight of that format, without a
    change to any number; others become a StackedWeight.
    """
    joined: QuantisedWeight | None = None
    if all(isinstance(part, Fp8Weight) for part in parts):
        joined = join_fp8([part for part in parts if isinstance(part, Fp8Weight)])
    elif all(isinstance(part, Int4Weight) for part in parts):
        joined = join_int4([part for part in parts if isinstance(part, Int4Weight)])
    elif all(isinstance(part, Nvfp4Weight) for part in parts):
        joined = join_nvfp4([part for part in parts if isinstance(part, Nvfp4Weight)])
    elif all(isinstance(part, BlockWeight) for part in parts):
        joined = join_blocks([part for part in parts if isinstance(part, BlockWeight)])
    return joined or StackedWeight(tuple(parts))
