"""Biases of zeros that older tools wrote beside all quantised weights of GPTQ."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.filling import read_tensor

__all__ = ["zero_biases"]


def zero_biases(
    config: DecoderConfig,
    tensors: TensorSource,
    places: Mapping[str, torch.Tensor],
    extra: Collection[str],
) -> set[str]:
    """Those of the `extra` tensors that are biases of zeros of a GPTQ model's matrices: they have no effect.

    places: the model's own tensors, by name.
    """
    if config.quantisation is None or "gptq" not in config.quantisation.storages:
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
