"""Random weights, to run a model of given shapes without its files."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

import torch

__all__ = ["RandomTensors"]


class RandomTensors:
    """A TensorSource of normally distributed numbers, drawn on the device, the same for the same seed.

    Matrices [out, in] have the standard deviation 1 / sqrt(in), so that they keep the scale of their input.
    Vectors have the standard deviation 0.02, with mean `norm_mean` for norms and 0 for biases.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        norm_mean: float = 1.0,
    ) -> None:
        self.location = f"random weights of seed {seed}"
        self._shapes = shapes
        self._dtype = dtype
        self._seed = seed
        self._norm_mean = norm_mean
        self._generator = torch.Generator(device)

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
        mean = self._norm_mean if name.endswith("norm.weight") else 0.0
        deviation = shape[-1] ** -0.5 if len(shape) == 2 else 0.02
        place.normal_(mean, deviation, generator=self._generator)
