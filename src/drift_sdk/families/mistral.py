"""Mistral 7B, Mistral Nemo and Mistral Small, also as the text part of Mistral Small 3."""

from __future__ import annotations

from drift_sdk.spec.family import Family
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import Settings, attention_layers, read_attention, read_decoder, read_mlp


def read_spec(settings: Settings) -> ModelSpec:
    return read_decoder(settings, attention_layers(settings, read_attention(settings)), read_mlp(settings))


FAMILY = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    spec=read_spec,
    outer=("Mistral3ForConditionalGeneration",),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
