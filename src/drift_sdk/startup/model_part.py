"""Loading of a model, or of the part of one that a GPU has, and of its draft."""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.execution.device.memory import return_freed_memory
from drift_sdk.execution.drafter_factory import DrafterFactory
from drift_sdk.loading.source import Source
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.shard import Shard, cut_head, load_shard
from drift_sdk.progress import Report
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.device_memory import DeviceMemory
from drift_sdk.startup.draft_startup import open_drafter_factory
from drift_sdk.startup.weight_form import choose_weight_form

__all__ = ["ModelPart", "StoredWeights", "load_part"]


class ModelPart(Struct, frozen=True, kw_only=True):
    """A model on a device, or the part of one that a GPU has, and its draft. memory: of the device."""

    decoder: Decoder
    memory: DeviceMemory
    drafter_factory: DrafterFactory


class StoredWeights(Struct, frozen=True):
    """Source, configuration and dtype of the decoder's weights, the part of them to load (None: all), and the
    memory of the device to load them on."""

    source: Source
    spec: ModelSpec
    dtype: torch.dtype
    shard: Shard | None
    memory: DeviceMemory

    @property
    def device(self) -> torch.device:
        return self.memory.device


def load_part(weights: StoredWeights, config: EngineConfig, report: Report) -> ModelPart:
    """Load the decoder, or its part, and the draft on a device."""
    memory = weights.memory
    decoder = _load_decoder(weights, config, memory, report)
    drafter_factory = open_drafter_factory(config, decoder, report, weights.source, memory.check_weights)
    if weights.shard is not None:
        cut_head(decoder, weights.shard)
    if weights.device.type == "cpu":  # of tensors that were quantised or converted: the KV cache may have it
        return_freed_memory(weights.device)
    return ModelPart(decoder=decoder, memory=memory, drafter_factory=drafter_factory)


def _load_decoder(
    weights: StoredWeights, config: EngineConfig, memory: DeviceMemory, report: Report
) -> Decoder:
    report("load weights", 0.0)
    form = choose_weight_form(config, weights.spec)
    if weights.shard is not None:
        return _load_shard(weights, weights.shard, config, memory, report)

    if config.load == "random":
        return Decoder.random(
            weights.spec,
            device=weights.device,
            dtype=weights.dtype,
            form=form,
            kv_form=config.kv_dtype,
            check_bytes=memory.check_weights,
        )

    return Decoder.load(
        weights.spec,
        weights.source.tensors(),
        device=weights.device,
        dtype=weights.dtype,
        form=form,
        kv_form=config.kv_dtype,
        on_tensor=lambda done, total: report("load weights", done / total),
        check_bytes=memory.check_weights,
    )


def _load_shard(
    weights: StoredWeights, shard: Shard, config: EngineConfig, memory: DeviceMemory, report: Report
) -> Decoder:
    tensors: TensorSource
    if config.load == "random":
        tensors = random_tensors(weights.spec, device=weights.device, dtype=weights.dtype)
    else:
        tensors = weights.source.tensors()
    return load_shard(
        weights.spec,
        tensors,
        shard,
        device=weights.device,
        dtype=weights.dtype,
        kv_form=config.kv_dtype,
        on_tensor=lambda done, total: report("load weights", (shard.rank + done / total) / shard.size),
        check_bytes=memory.check_weights,
    )
