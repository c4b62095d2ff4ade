"""Weights of 4-bit floating-point numbers (e2m1) in groups of 16 columns, with e4m3 scales (NVFP4).

A number of the matrix is value * (scale / global) if global scales divide, as compressed-tensors stores them,
and value * (scale * global) if they multiply, as ModelOpt does; all in float32, rounded after each operation.
Quantising makes scales as large as e4m3 permits, and the global scale takes that back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drift_sdk.quantised.e2m1 import pairs_of_bytes
from drift_sdk.quantised.weight import QuantisedWeight

__all__ = ["NVFP4_GROUP", "Nvfp4Weight", "join_nvfp4"]

NVFP4_GROUP = 16
"""Columns that share a scale."""


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
        numbers = pairs_of_bytes(torch.float32, self.device)[self.codes.int()].view(self.shape)
        scales = self.group_scales()
        num_whole = numbers.shape[1] // NVFP4_GROUP
        whole, rest = numbers[:, : num_whole * NVFP4_GROUP], numbers[:, num_whole * NVFP4_GROUP :]
        whole.unflatten(1, (num_whole, NVFP4_GROUP)).mul_(scales[:, :num_whole, None])
        rest.mul_(scales[:, -1:])
        return numbers.to(dtype)

    def rows(self, index: torch.Tensor) -> Nvfp4Weight:
        # Indexing is not implemented for 8-bit floating-point numbers on every device.
        scales = self.scales.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        return Nvfp4Weight(self.codes[index], scales, self.global_scales[index], self.is_divided)

    def to(self, device: torch.device) -> Nvfp4Weight:
        codes, scales, global_scales = (tensor.to(device) for tensor in self.tensors())
        return Nvfp4Weight(codes, scales, global_scales, self.is_divided)


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
