"""MXFP4 numbers: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0).

Format: OCP Microscaling Formats (MX) Specification 1.0. A byte holds two neighbours of a row, the even one in
its low four bits. A number v in a block of scale s is v * 2 ** (s - 127). Scale 255 is NaN.
"""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.quantised.e2m1 import pairs_of_bytes

__all__ = ["BLOCK_BYTES", "BLOCK_SIZE", "MAX_SCALE", "SCALE_BIAS", "ScaleCheck", "dequantise"]

BLOCK_SIZE = 32
"""Numbers that share a scale."""
BLOCK_BYTES = BLOCK_SIZE // 2
MAX_SCALE = 252
"""The largest scale of which every number is finite in float32 and bfloat16: 6 * 2 ** 125 < 2 ** 128."""

SCALE_BIAS = 127
"""The scale of a factor of 1."""
NAN_SCALE = 255


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
