"""A decoder with random weights that are the same on every device."""

from __future__ import annotations

import torch

from drift_sdk.loading.random import RandomTensors
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.spec.model import ModelSpec

__all__ = ["drawn_decoder"]


class _DrawnTensors(RandomTensors):
    """Random tensors that are drawn on the CPU and copied to their device."""

    def read_into(self, name: str, place: torch.Tensor) -> None:
        drawn = torch.empty(place.shape, dtype=place.dtype)
        super().read_into(name, drawn)
        place.copy_(drawn)


def drawn_decoder(spec: ModelSpec, device: str, seed: int, form: WeightForm = "expanded") -> Decoder:
    """A decoder in float32; its weights are quantised as `form` says.

    Tests that depend on the output of a random model get the same one on any device.
    """
    cpu = torch.device("cpu")
    tensors = _DrawnTensors(tensor_shapes(spec), device=cpu, dtype=torch.float32, seed=seed)
    return Decoder.load(spec, tensors, device=device, dtype=torch.float32, form=form)
