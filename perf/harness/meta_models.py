"""Models whose weights have shapes alone, without memory: to record which kernels an engine launches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from msgspec import Struct

from drift_sdk.models.assistant import (
    ORDERING,
    AssistantConfig,
    AssistantDecoder,
    assistant_shapes,
    load_assistant_weights,
)
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashConfig, DFlashDecoder, dflash_shapes, load_dflash_weights
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import DraftDecoder, load_draft_weights, required_shapes, shareable_shapes
from perf.harness.mtp_draft import CLUSTERS, assistant_settings
from perf.harness.shapes import dflash_settings, draft_settings

__all__ = ["META_DTYPE", "NUM_META_LAYERS", "meta_assistant", "meta_dflash", "meta_draft"]

META_DTYPE = torch.bfloat16
NUM_META_LAYERS = 4
"""Enough for a draft that takes the inputs of three layers, and for a layer of each kind of hybrid models.
Layers share kernels."""


class MetaTensors(Struct, frozen=True):
    """A TensorSource of tensors without memory."""

    shapes: Mapping[str, tuple[int, ...]]
    location: str = "shapes"

    def names(self) -> Collection[str]:
        return self.shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], dtype=META_DTYPE, device="meta")


def meta_draft(settings: Mapping[str, object], decoder: Decoder) -> DraftDecoder:
    """Return an EAGLE-3 draft of the target's width, with a reduced vocabulary.

    settings: the config.json of the target, which has NUM_META_LAYERS layers or more.
    """
    config = DraftConfig.from_hf(draft_settings(settings), decoder.spec)
    tensors = MetaTensors(required_shapes(config) | shareable_shapes(config))
    ids = torch.arange(config.draft_vocab_size, device="cpu")
    return DraftDecoder(config, load_draft_weights(config, tensors, ids, decoder.weights), decoder)


def meta_assistant(settings: Mapping[str, object], decoder: Decoder) -> AssistantDecoder:
    """Return an assistant of published size, with clusters of tokens. settings: as of `meta_draft`."""
    config = AssistantConfig.from_hf(assistant_settings(settings) | CLUSTERS, decoder.spec)
    clusters = torch.zeros(config.shape.vocab_size, dtype=torch.int32, device="meta")
    tensors = MetaTensors(assistant_shapes(config) | {ORDERING: tuple(clusters.shape)})
    return AssistantDecoder(config, load_assistant_weights(config, tensors, clusters, decoder), decoder)


def meta_dflash(settings: Mapping[str, object], decoder: Decoder, block_size: int) -> DFlashDecoder:
    """Return a DFlash head of the target's width, with an embedding and a head of its own.

    settings: as of `meta_draft`. block_size: rows of a draft.
    """
    config = DFlashConfig.from_hf(dflash_settings(settings, block_size), decoder.spec)
    ids = torch.arange(config.draft_vocab_size, device="cpu")
    weights = load_dflash_weights(config, MetaTensors(dflash_shapes(config)), ids, decoder)
    return DFlashDecoder(config, weights, decoder)
