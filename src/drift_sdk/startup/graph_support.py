"""Options of models that the graph executor does not support."""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.startup.weight_form import is_quantised, stored_scheme

__all__ = ["options_without_graphs"]

NVFP4_STORAGES = ("compressed_nvfp4", "modelopt_nvfp4")


def options_without_graphs(model: DecoderConfig, config: EngineConfig) -> tuple[str, ...]:
    """The options of a model, and of its form in memory, that graphs lack, in words; empty if graphs can run
    it."""
    is_kept = is_quantised(config, model)
    scheme = stored_scheme(config, model)
    storages = scheme.storages if scheme is not None and is_kept else ()
    has_nvfp4 = config.weights == "nvfp4" or any(storage in NVFP4_STORAGES for storage in storages)
    lacking = {
        "quantised weights in blocks of GGUF": "blocks" in storages,
        "NVFP4 weights": has_nvfp4,
        "quantised weights of experts": model.experts is not None and is_kept,
        "a KV cache in NVFP4": config.kv_dtype == "nvfp4",
    }
    return tuple(option for option, is_used in lacking.items() if is_used)
