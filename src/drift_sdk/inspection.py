"""Examination of a model before it is loaded."""

from __future__ import annotations

from pathlib import Path

from drift_sdk._fields import with_config
from drift_sdk.config import EngineConfig
from drift_sdk.driver.model_opener import opening_error
from drift_sdk.errors import ConfigError, DriftError
from drift_sdk.model_info import ModelInfo

__all__ = ["inspect"]


@with_config(EngineConfig)
def inspect(model: str | Path, config: EngineConfig | None = None) -> ModelInfo:
    """Find out whether an engine can serve a model with a config on this machine, and what that takes,
    without loading or downloading weights.

    model:  as of `Engine`. For a hub id, the small files (settings and tokenizer) are downloaded to the hub's
            cache, and of a .gguf file there the header.
    config: as of `Engine`. The draft of its speculation is not examined.

    Blocks for as long as files are read and the hub answers: in a coroutine, use
    `await asyncio.to_thread(inspect, model)`. Imports torch, and initialises CUDA if the device is a GPU.

    What keeps an engine from serving the model is in `ModelInfo.reasons`. Raises ModelLoadError if the model
    cannot be found or examined, and ConfigError for a wrong argument.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError.of("config", config, "an EngineConfig")

    try:
        # Imported here, so that `import drift_sdk` loads no torch.
        from drift_sdk.startup.model_inspection import inspect_model

        return inspect_model(model, config if config is not None else EngineConfig())
    except DriftError:
        raise
    except Exception as error:
        raise opening_error(error) from error
