"""Options of models that the graph executor does not support."""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.startup.weight_form import is_quantised

__all__ = ["options_without_graphs"]


def options_without_graphs(model: DecoderConfig, config: EngineConfig) -> tuple[str, ...]:
    """The options of a model, and of its form in memory, that graphs lack, in words; empty if graphs can run
    it."""
    is_kept = is_quantised(config, model)
    lacking = {
        "quantised weights of experts": model.experts is not None and is_kept,
        "a KV cache in NVFP4": config.kv_dtype == "nvfp4",
    }
    return tuple(option for option, is_used in lacking.items() if is_used)
