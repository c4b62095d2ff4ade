"""Options of models that the graph executor does not support."""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.startup.weight_form import is_quantised, stored_scheme

__all__ = ["options_without_graphs"]


def options_without_graphs(model: DecoderConfig, config: EngineConfig) -> tuple[str, ...]:
    """The options of a model, and of its form in memory, that graphs lack, in words; empty if graphs can run
    it."""
    scheme = stored_scheme(config, model)
    storages = scheme.storages if scheme is not None and is_quantised(config, model) else ()
    lacking = {
        "quantised weights in blocks of GGUF": "blocks" in storages,
        "stored NVFP4 weights": bool({"compressed_nvfp4", "modelopt_nvfp4"} & {*storages}),
        "quantised weights of experts": model.experts is not None and is_quantised(config, model),
    }
    return tuple(option for option, is_used in lacking.items() if is_used)
