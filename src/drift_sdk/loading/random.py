"""Random weights: a model's shapes and speed without its files."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

import torch

__all__ = ["RandomTensors"]


class RandomTensors:
    """A TensorSource of random numbers, drawn on the device itself and the same for the same seed.

    Matrices keep the scale of what they multiply (deviation 1 / sqrt(in)), norms are near one, biases small.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.location = f"random weights of seed {seed}"
        self._shapes = shapes
        self._dtype = dtype
        self._seed = seed
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
        """Draw into `place`, on the source's device; other types get other numbers."""
        shape = self._shapes[name]
        # Seeded by name as well, so that a tensor does not depend on which were drawn before it; hashed into
        # 32 bits because the CPU's generator looks at no more.
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        deviation = shape[-1] ** -0.5 if len(shape) == 2 else 0.02
        place.normal_(mean, deviation, generator=self._generator)
