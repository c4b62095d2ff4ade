"""The text model inside a model that reads images as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr

__all__ = ["text_settings"]

TEXT_PARTS = {"Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text")}
"""Architecture and model_type of the text part of each architecture that has one."""
OUTER_SETTINGS = ("quantization_config", "tie_word_embeddings")


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text part of a config.json; those of a model that is all text are returned as they
    are.

    Raises ModelLoadError if the settings of the text part are missing.
    """
    architectures = config.get("architectures")
    found = [part for name, part in TEXT_PARTS.items() if architectures == [name]]
    if not found:
        return config

    settings = config.get("text_config")
    if not isinstance(settings, Mapping):
        raise ModelLoadError(f"config: text_config={short_repr(settings)}: expected a table of settings")

    architecture, model_type = found[0]
    outer = {name: config[name] for name in OUTER_SETTINGS if config.get(name) is not None}
    return {**settings, **outer, "architectures": [architecture], "model_type": model_type}
