"""Tensors in a model's files that have no effect on the model."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

import torch

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.filling import read_tensor
from drift_sdk.spec.model import ModelSpec

__all__ = ["later_layers", "zero_biases"]

LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,9})\.")

log = logging.getLogger("drift_sdk")


def zero_biases(
    spec: ModelSpec,
    tensors: TensorSource,
    places: Mapping[str, torch.Tensor],
    extra: Collection[str],
) -> set[str]:
    """The `extra` tensors that are biases of zeros, which older tools wrote beside all matrices of a GPTQ
    model.

    places: the model's own tensors, by name.
    """
    if spec.quantisation is None or "gptq" not in spec.quantisation.storages:
        return set()

    matrices = {name: places.get(name.removesuffix("bias") + "weight") for name in extra}
    return {
        name
        for name, matrix in matrices.items()
        if name.endswith(".bias")
        and matrix is not None
        and tensors.shape(name) == tuple(matrix.shape[:1])
        and not read_tensor(tensors, name).any()
    }


def later_layers(spec: ModelSpec, tensors: TensorSource, extra: Collection[str]) -> set[str]:
    """The `extra` tensors of layers after the config's last one: as in transformers, the config counts. A
    warning says so."""
    layers = {name: int(found[1]) for name in extra if (found := LAYER.match(name))}
    later = {name for name, layer in layers.items() if layer >= spec.num_layers}
    if later:
        log.warning(
            "%s: tensors of layer %d and later are left out: the config says num_hidden_layers=%d",
            tensors.location,
            min(layers[name] for name in later),
            spec.num_layers,
        )
    return later
