"""Choice of the form that a model's weights have in memory."""

from __future__ import annotations

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.matrix_reader import QUANTISERS, WeightForm
from drift_sdk.quantised.scheme import Scheme

__all__ = ["choose_weight_form", "is_quantised", "stored_scheme"]


def choose_weight_form(config: EngineConfig, model: DecoderConfig) -> WeightForm:
    """The form of a model's weights. Without `EngineConfig.weights` they are expanded: the eager executor
    dequantises a weight at each use, which takes longer than a step of decoding does.

    Raises ConfigError for quantising a model whose files are quantised.
    """
    form = config.weights or "expanded"
    scheme = stored_scheme(config, model)
    if form in QUANTISERS and scheme is not None:
        allowed = f'None, "stored" or "expanded": the files are quantised ({scheme.name})'
        raise ConfigError.of("weights", form, allowed)

    return form


def is_quantised(config: EngineConfig, model: DecoderConfig) -> bool:
    """Whether matrices other than MXFP4 experts remain quantised in memory."""
    form = choose_weight_form(config, model)
    return form in QUANTISERS or (form == "stored" and stored_scheme(config, model) is not None)


def stored_scheme(config: EngineConfig, model: DecoderConfig) -> Scheme | None:
    """The scheme of the files that are loaded; None if they have no quantised weights but MXFP4 experts."""
    scheme = model.quantisation
    # A scheme without storages has scales of the KV cache alone.
    return scheme if config.load == "auto" and scheme is not None and scheme.storages else None
