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

from drift_sdk.quantised.weight import QuantisedWeight

__all__ = ["BLOCK_FORMATS", "BlockFormat", "BlockWeight", "join_blocks"]

BlockFormat = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

CHUNK_NUMBERS = 1 << 18
"""Numbers that are dequantised at a time, so that the intermediate results stay in a CPU's cache."""


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
        columns = BLOCK_FORMATS[self.format][0]
        flat = self.blocks.view(-1, self.blocks.shape[2])
        numbers = torch.empty((len(flat), columns), dtype=dtype, device=flat.device)
        step = CHUNK_NUMBERS // columns if flat.device.type == "cpu" else max(len(flat), 1)
        for start in range(0, len(flat), step):
            numbers[start : start + step] = DEQUANTISE[self.format](flat[start : start + step])
        return numbers.view(self.shape)

    def rows(self, index: torch.Tensor) -> BlockWeight:
        return BlockWeight(self.blocks[index], self.format)

    def to(self, device: torch.device) -> BlockWeight:
        return BlockWeight(self.blocks.to(device), self.format)


def join_blocks(parts: Sequence[BlockWeight]) -> BlockWeight | None:
    """The rows of all parts as one weight; None if their formats differ."""
    if len({part.format for part in parts}) > 1:
        return None

    return BlockWeight(torch.cat([part.blocks for part in parts]), parts[0].format)


# Functions from blocks [B, bytes] to numbers [B, columns] in float32.


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:], 16).to(torch.float32).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:], 16).to(torch.float32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:], 16) | (_bits(blocks[:, 2:6]) << 4)
    return codes.to(torch.float32).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:], 16) | (_bits(blocks[:, 4:8]) << 4)
    return codes.to(torch.float32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_k(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    # Bit s of byte l is the fifth bit of column 32 s + l.
    high = torch.stack([(blocks[:, 16:48] >> group) & 1 for group in range(8)], dim=1)
    return _scaled_k(blocks, _nibbles(blocks[:, 48:], 32) | (high.view(-1, 256) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # 64 bytes of low bits and 32 bytes of high bits for each half of the block.
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].view(-1, 2, 32)
    high = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 256)
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32) * _half(blocks, 208)
    numbers = (low | (high << 4)).to(torch.float32).sub_(32)
    numbers.view(-1, 16, 16).mul_(scales[:, :, None])
    return numbers


def _scaled_k(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The numbers of codes [B, 256] of Q4_K or Q5_K blocks."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, middle, high = packed[:, 0], packed[:, 1], packed[:, 2]
    # Six bits each: of the first four groups in one byte, of the last four in two.
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    offsets = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    factors = scales.to(torch.float32) * _half(blocks, 0)
    shifts = offsets.to(torch.float32) * _half(blocks, 2)
    numbers = codes.to(torch.float32)
    numbers.view(-1, 8, 32).mul_(factors[:, :, None]).sub_(shifts[:, :, None])
    return numbers


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 number that begins at byte `start` of each block, [B, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """The codes of bytes [B, n]: the low four bits of `run` bytes, then their high ones, [B, 2 n]."""
    grouped = packed.reshape(len(packed), -1, 1, run)
    return torch.cat((grouped & 15, grouped >> 4), dim=2).view(len(packed), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of bytes [B, n], the lowest of each byte first, [B, 8 n] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).view(len(packed), -1)


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

DEQUANTISE: dict[BlockFormat, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
