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
    cpu, shapes, names = torch.device("cpu"), tensor_shapes(spec), spec.names.experts
    norms = tuple(f"{name}.weight" for name in (names.mlp_post_norm, names.norm, names.post_norm))
    factors = (spec.names.factor, names.input_factors, names.expert_factors, *norms)
    moments = {name: (1.0, 0.2) for name in shapes if name.endswith(factors)}
    tensors = _DrawnTensors(shapes, device=cpu, dtype=torch.float32, seed=seed, moments=moments)
    return Decoder.load(spec, tensors, device=device, dtype=torch.float32, form=form)
