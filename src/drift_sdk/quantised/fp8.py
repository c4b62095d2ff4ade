"""Eight-bit floating-point numbers (e4m3), and weights of them with float32 scales.

They have a sign, four bits of exponent and three of mantissa. A number of the matrix is
float32(value) * scale, in float32. NaN codes (0x7f, 0xff) are no weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drift_sdk.quantised.weight import QuantisedWeight

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
