"""Weights of 4-bit floating-point numbers (e2m1) in groups of 16 columns, with e4m3 scales (NVFP4).

e2m1 has a sign, two bits of exponent and one of mantissa.

A number of the matrix is value * (scale / global) if global scales divide, as compressed-tensors stores them,
and value * (scale * global) if they multiply, as ModelOpt does; all in float32, rounded after each operation.
Quantising chooses each global scale so that the scales of its rows use the range of e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drift_sdk.quantised.fp8 import E4M3, MAX_E4M3
from drift_sdk.quantised.weight import QuantisedWeight

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
CHUNK_NUMBERS = 1 << 22
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
    num_rows = max(1, CHUNK_NUMBERS // max(1, matrix.shape[1]))
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
