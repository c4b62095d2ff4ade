"""A head that files store although the config says that it is the embedding."""

from __future__ import annotations

import logging

import torch
from msgspec import structs

from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.filling import read_tensor
from drift_sdk.quantised.weight import Matrix, dequantised, take_rows
from drift_sdk.spec.model import ModelSpec

__all__ = ["with_stored_head"]

COMPARED_ROWS = 4096
"""Rows of both that are compared at a time."""

log = logging.getLogger("drift_sdk")


def with_stored_head(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """The spec, with a head that is not tied to the embedding if files store one that differs from it: the
    files count, as in transformers. A warning says so.

    tensors: known to be those of the spec. Embedding and head are read as they are stored.
    """
    head, embedding = spec.names.head, spec.names.embedding
    if not spec.is_head_tied or head not in tensors.names() or _are_same(spec, tensors):
        return spec

    log.warning(
        "%s: tensor %s differs from %s, so it is the head, although the config says tie_word_embeddings",
        tensors.file(head),
        head,
        embedding,
    )
    return structs.replace(spec, is_head_tied=False)


def _are_same(spec: ModelSpec, tensors: TensorSource) -> bool:
    head, embedding = (_stored_matrix(tensors, name) for name in (spec.names.head, spec.names.embedding))
    for index in torch.arange(spec.vocab_size, device="cpu").split(COMPARED_ROWS):
        parts = (dequantised(take_rows(matrix, index), torch.float32) for matrix in (head, embedding))
        if not torch.equal(*parts):
            return False

    return True


def _stored_matrix(tensors: TensorSource, name: str) -> Matrix:
    """A matrix on the CPU, quantised if files have it so."""
    weight = tensors.quantised(name, torch.device("cpu")) if isinstance(tensors, QuantisedSource) else None
    return read_tensor(tensors, name) if weight is None else weight
