"""Random weights, to run a model of given shapes without its files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from drift_sdk.loading.stored_formats import SCALE_BIAS
from drift_sdk.quantised.formats import MAGNITUDES, MXFP4_BLOCK, Fp8Weight, quantise_fp8


class RandomTensors:
    """A TensorSource of normally distributed numbers, drawn on the device, the same for the same seed.

    Matrices [out, in] have the standard deviation 1 / sqrt(in), so that they keep the scale of their input.
    Vectors have the standard deviation 0.02, with mean `norm_mean` for norms and 0 for biases. MXFP4 weights
    have random codes and the one scale that comes nearest to the deviation of matrices.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        norm_mean: float = 1.0,
        moments: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        """moments: mean and standard deviation of tensors that have others, by name."""
        self.location: str = f"random weights of seed {seed}"
        self._shapes = shapes
        self._dtype = dtype
        self._seed = seed
        self._norm_mean, self._moments = norm_mean, moments
        self._generator = torch.Generator(device)
        self.num_readers = 1  # there is one generator

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._generator.device)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`, a tensor on the source's device. The numbers depend on its dtype."""
        shape = self._shapes[name]
        # The seed includes the name, so that a tensor does not depend on which were drawn before it. It is
        # hashed into 32 bits because the CPU's generator uses no more.
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if place.dtype == torch.uint8:
            if name.endswith("_scales"):
                place.fill_(_mxfp4_scale(MXFP4_BLOCK * shape[-1]))
            else:
                place.random_(0, 256, generator=self._generator)
            return

        mean = self._norm_mean if name.endswith("norm.weight") else 0.0
        deviation = shape[-1] ** -0.5 if len(shape) == 2 else 0.02
        mean, deviation = self._moments.get(name, (mean, deviation))
        place.normal_(mean, deviation, generator=self._generator)


class RandomFp8Tensors(RandomTensors):
    """RandomTensors of a model whose files have FP8 in blocks: a QuantisedSource."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        projections: Collection[str],
        block: tuple[int, int],
        **options: Any,
    ) -> None:
        """projections: names of matrices, which are quantised if they have the rows and columns of a block.
        options: of RandomTensors."""
        super().__init__(shapes, **options)
        self._block = block
        self._quantised = {
            name
            for name in projections
            if all(size >= least for size, least in zip(shapes[name], block, strict=True))
        }

    def quantised_bytes(self, name: str) -> int | None:
        if name not in self._quantised:
            return None

        (rows, columns), (height, width) = self._shapes[name], self._block
        return rows * columns + 4 * -(-rows // height) * -(-columns // width)

    def quantised(self, name: str, device: torch.device) -> Fp8Weight | None:
        """As in QuantisedSource. device: the source's."""
        if name not in self._quantised:
            return None

        numbers = torch.empty(self._shapes[name], dtype=torch.float32, device=device)
        self.read_into(name, numbers)
        return quantise_fp8(numbers, self._block)


def _mxfp4_scale(num_columns: int) -> int:
    """The scale with which random codes have a standard deviation near 1 / sqrt(num_columns)."""
    deviation = math.sqrt(sum(magnitude**2 for magnitude in MAGNITUDES) / len(MAGNITUDES))
    return SCALE_BIAS - round(math.log2(deviation * math.sqrt(num_columns)))
