"""Options of models that the graph executor does not support."""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.startup.weight_form import is_quantised

__all__ = ["options_without_graphs"]


def options_without_graphs(model: DecoderConfig, config: EngineConfig) -> tuple[str, ...]:
    """The options of a model, and of its form in memory, that graphs lack, in words; empty if graphs can run
    it."""
    speculation = config.speculation
    lacking = {
        "quantised weights": is_quantised(config, model),
        "quantised weights of the draft": speculation is not None and speculation.draft_weights is not None,
    }
    return tuple(option for option, is_used in lacking.items() if is_used)
