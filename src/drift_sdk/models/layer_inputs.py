"""Inputs of layers that depend on a row's token alone, in plain torch: weights and forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from drift_sdk.models.allocation import Allocation
from drift_sdk.models.channels import activate
from drift_sdk.models.layers import embed, linear, normalise
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import LayerInputNames, LayerInputs, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """embedding: [vocab, num_layers * size]. projection: [num_layers * size, hidden]. norm: [size]."""

    embedding: Matrix
    projection: Matrix
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class InputWeights:
    """Of a layer. gate: [size, hidden]. projection: [hidden, size]. norm: [hidden]."""

    gate: Matrix
    projection: Matrix
    norm: torch.Tensor


def allocate_inputs(spec: ModelSpec, allocation: Allocation) -> LayerInputWeights | None:
    """The weights of the model; None: its layers have no such inputs."""
    if spec.layer_inputs is None:
        return None

    names, size = spec.names.layer_inputs, spec.layer_inputs.size
    columns = spec.num_layers * size
    return LayerInputWeights(
        embedding=allocation.matrix(names.embedding, spec.vocab_size, columns, is_projection=False),
        projection=allocation.matrix(names.model_projection, columns, spec.hidden_size),
        norm=allocation.tensor(names.model_norm, size),
    )


def allocate_input(
    spec: LayerInputs, names: LayerInputNames, layer: str, hidden: int, allocation: Allocation
) -> InputWeights:
    """layer: prefix of the layer's tensors."""
    return InputWeights(
        gate=allocation.matrix(f"{layer}.{names.gate}", spec.size, hidden),
        projection=allocation.matrix(f"{layer}.{names.projection}", hidden, spec.size),
        norm=allocation.tensor(f"{layer}.{names.norm}", hidden),
    )


def inputs_of(
    token_ids: torch.Tensor, embedded: torch.Tensor, weights: LayerInputWeights, spec: LayerInputs
) -> torch.Tensor:
    """The inputs of all layers [N, num_layers, size], of tokens [N] and their rows of the stream
    [N, hidden]."""
    shape, factor = (len(token_ids), -1, spec.size), embedding_factor(spec, embedded.dtype)
    own = embed(token_ids, weights.embedding, embedded.dtype).view(shape) * factor
    projected = linear(embedded, weights.projection) * embedded.shape[1] ** -0.5
    return (normalise(projected.view(shape), weights.norm, spec.norm) + own) * math.sqrt(0.5)


def embedding_factor(spec: LayerInputs, dtype: torch.dtype) -> float:
    """The factor of the embedding, rounded to `dtype`."""
    return float(torch.tensor(spec.size**0.5, dtype=dtype, device="cpu"))


def add_input(
    stream: torch.Tensor, given: torch.Tensor, weights: InputWeights, spec: LayerInputs
) -> torch.Tensor:
    """The stream [N, hidden] after a layer has taken its input [N, size]."""
    gated = activate(linear(stream, weights.gate), spec.activation) * given
    return stream + normalise(linear(gated, weights.projection), weights.norm, spec.norm)
