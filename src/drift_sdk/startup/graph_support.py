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
    has_blocks = scheme is not None and "blocks" in scheme.storages
    lacking = {
        "quantised weights in blocks of GGUF": has_blocks and is_quantised(config, model),
        "quantised weights of experts": model.experts is not None and is_quantised(config, model),
    }
    return tuple(option for option, is_used in lacking.items() if is_used)
