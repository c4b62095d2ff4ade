"""A head that files store although it is the embedding."""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.filling import read_tensor
from drift_sdk.quantised.weight import Matrix, dequantised, take_rows

__all__ = ["EMBEDDING", "HEAD", "check_tied_head"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096
"""Rows of both that are compared at a time."""


def check_tied_head(config: DecoderConfig, tensors: TensorSource) -> None:
    """Raise ModelLoadError if a stored head differs from the embedding although the config ties them.

    tensors: known to be those of the config. Embedding and head are read as they are stored.
    """
    if not config.is_head_tied or HEAD not in tensors.names():
        return

    head, embedding = _stored_matrix(tensors, HEAD), _stored_matrix(tensors, EMBEDDING)
    for index in torch.arange(config.vocab_size, device="cpu").split(COMPARED_ROWS):
        parts = (dequantised(take_rows(matrix, index), torch.float32) for matrix in (head, embedding))
        if not torch.equal(*parts):
            raise ModelLoadError(
                f"{tensors.file(HEAD)}: tensor {HEAD} differs from {EMBEDDING}, expected the same: "
                "the config says tie_word_embeddings"
            )


def _stored_matrix(tensors: TensorSource, name: str) -> Matrix:
    """A matrix on the CPU, quantised if files have it so."""
    weight = tensors.quantised(name, torch.device("cpu")) if isinstance(tensors, QuantisedSource) else None
    return read_tensor(tensors, name) if weight is None else weight
