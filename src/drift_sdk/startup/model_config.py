"""The decoder's configuration from a model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source
from drift_sdk.spec.model import ModelSpec


def read_config(source: Source, config: EngineConfig) -> ModelSpec:
    """The decoder's configuration; ModelLoadError naming the file, the setting and its value."""
    settings = source.config  # its errors name the file
    file = _settings_file(source)
    try:
        return read_spec(settings, max_model_len=config.max_model_len)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:  # settings of a wrong type may raise anything
        raise ModelLoadError(f"{file}: not the config of a model: {error!r}") from error


def check_kv_scheme(source: Source, config: EngineConfig, model: ModelSpec) -> None:
    """Raise ModelLoadError naming file and setting if the files' scales of the KV cache are not those of
    `EngineConfig.kv_dtype`, and ConfigError for keys and values of several shapes, whose scales are none."""
    if config.kv_dtype is not None and len(model.kv_groups) > 1:
        allowed = "None for a model whose layers keep keys and values of different shapes"
        raise ConfigError.of("kv_dtype", config.kv_dtype, allowed)

    scheme = model.quantisation
    if config.load == "auto" and config.kv_dtype == "fp8" and scheme is not None and scheme.kv_obstacle:
        raise ModelLoadError(
            f"{_settings_file(source)}: config: quantization_config with {scheme.kv_obstacle} is not "
            'implemented for kv_dtype="fp8": expected static scales of e4m3'
        )


def _settings_file(source: Source) -> Path:
    return source.path if source.path.is_file() else source.path / "config.json"


def hub_settings(config: EngineConfig) -> dict[str, Any]:
    """Arguments of `find` and `resolve` for any role."""
    return {"cache_dir": config.cache_dir, "local_files_only": config.local_files_only}
