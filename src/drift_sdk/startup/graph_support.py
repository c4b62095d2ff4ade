"""Options of models that the graph executor does not support."""

from __future__ import annotations

from drift_sdk.models.decoder_config import DecoderConfig

__all__ = ["options_without_graphs"]


def options_without_graphs(config: DecoderConfig) -> tuple[str, ...]:
    """The options of a model that graphs lack, in words; empty if graphs can run it."""
    lacking: dict[str, bool] = {}
    return tuple(option for option, is_used in lacking.items() if is_used)
