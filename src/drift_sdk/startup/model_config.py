"""The decoder's configuration from a model's files."""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.source import Source
from drift_sdk.models.decoder_config import DecoderConfig

__all__ = ["read_config"]


def read_config(source: Source, config: EngineConfig) -> DecoderConfig:
    """The decoder's configuration; ModelLoadError naming the file, the setting and its value."""
    settings = source.config  # its errors name the file
    file = source.path if source.path.is_file() else source.path / "config.json"
    try:
        return DecoderConfig.from_hf(settings, max_model_len=config.max_model_len)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:  # settings of a wrong type may raise anything
        raise ModelLoadError(f"{file}: not the config of a model: {error!r}") from error
