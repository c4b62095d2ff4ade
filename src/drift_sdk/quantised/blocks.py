"""Weights in the blocks of GGUF files, as the files store them.

A block is a number of neighbouring columns of a row, with their scales. Layouts are those of ggml's
ggml-common.h; all numbers are little-endian. The formulas, in float32, with q the code, d and m numbers that
are stored in float16, and sums and products rounded one by one:

Q8_0           q * d                       q int8
Q4_0, Q5_0     (q - 8) * d, (q - 16) * d
Q4_1, Q5_1     q * d + m
Q4_K, Q5_K     (d * s) * q - (m * t)       s and t of 6 bits for each 32 columns
Q6_K           (d * s) * (q - 32)          s int8 for each 16 columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from drift_sdk.quantised.weight import GroupedIntegers, QuantisedWeight

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
