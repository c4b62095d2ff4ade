"""Llama 2 and 3, and models of the same layers.

GGUF files of Mistral models have the architecture "llama" as well.
"""

from __future__ import annotations

from drift_sdk.spec.family import Family, GGUFArchitecture
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import (
    Settings,
    attention_layers,
    read_attention,
    read_bool,
    read_decoder,
    read_mlp,
)


def read_spec(settings: Settings) -> ModelSpec:
    mixers = attention_layers(settings, read_attention(settings))
    return read_decoder(settings, mixers, read_mlp(settings, has_bias=read_bool(settings, "mlp_bias")))


FAMILY = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    spec=read_spec,
    gguf=(GGUFArchitecture(name="llama", is_permuted=True, keys=("attention.sliding_window",)),),
)
