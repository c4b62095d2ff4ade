"""Choice of the form that a model's weights have in memory."""

from __future__ import annotations

import msgspec
import torch

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.models.decoder import random_tensors
from drift_sdk.models.matrix_reader import QUANTISERS, WeightForm
from drift_sdk.models.weights import odd_columns, weight_bytes
from drift_sdk.quantised.scheme import Scheme
from drift_sdk.spec.model import ModelSpec

__all__ = ["bytes_without_files", "choose_weight_form", "stored_scheme", "with_weight_form"]


def with_weight_form(
    config: EngineConfig, model: ModelSpec, executor: str, device: torch.device, dtype: torch.dtype
) -> EngineConfig:
    """The config with the form of the weights that `EngineConfig.weights` = None stands for: "stored" if
    kernels multiply by the quantised weights of the files, which takes the least time and memory; else
    "expanded", because dequantising a weight at each use takes longer than a step of decoding does."""
    if config.weights is not None:
        return config

    is_multiplied = (
        stored_scheme(config, model) is not None
        and config.tensor_parallel == 1
        and executor == "graph"
        and _has_products(device, dtype)
    )
    return msgspec.structs.replace(config, weights="stored" if is_multiplied else "expanded")


def _has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply by quantised weights on a device, for a model of `dtype`."""
    from drift_sdk._kernels.quantised.dequantise import programs_run  # needs the packages of a GPU

    return programs_run(device, dtype)


def choose_weight_form(config: EngineConfig, model: ModelSpec) -> WeightForm:
    """The form of a model's weights, for a config of `with_weight_form` or for what is known before: None
    counts as "expanded".

    Raises ConfigError for quantising a model whose files are quantised, or whose matrices cannot have the
    form.
    """
    form = config.weights or "expanded"
    scheme = stored_scheme(config, model)
    if form in QUANTISERS and scheme is not None:
        allowed = f'None, "stored" or "expanded": the files are quantised ({scheme.name})'
        raise ConfigError.of("weights", form, allowed)

    if reason := odd_columns(model, form):
        raise ConfigError.of("weights", form, f'None, "expanded" or "fp8": {reason}')

    return form


def bytes_without_files(config: EngineConfig, model: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of weights that do not depend on files: of all but those that files store quantised. Raises
    ConfigError as `choose_weight_form`."""
    form = choose_weight_form(config, model)
    if config.load == "random" and form == "stored":
        tensors = random_tensors(model, device=torch.device("cpu"), dtype=dtype, form=form)
        return weight_bytes(model, dtype, form, tensors)

    return weight_bytes(model, dtype, form)


def stored_scheme(config: EngineConfig, model: ModelSpec) -> Scheme | None:
    """The scheme of the files that are loaded; None if they have no quantised weights but MXFP4 experts."""
    scheme = model.quantisation
    # A scheme without storages has scales of the KV cache alone.
    return scheme if config.load == "auto" and scheme is not None and scheme.storages else None
