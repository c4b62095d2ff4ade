"""Weights of 4-bit integers in groups of columns, with a scale and perhaps a zero point for each group.

A number of the matrix is float32(code - zero) * float32(scale), in float32. Codes are 0 to 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drift_sdk.quantised.weight import QuantisedWeight

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
