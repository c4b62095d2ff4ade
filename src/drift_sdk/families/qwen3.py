"""Qwen3."""

from __future__ import annotations

from drift_sdk.families.qwen2 import windowed_layers
from drift_sdk.spec.family import Family, GGUFArchitecture
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import Settings, read_attention, read_decoder, read_mlp, read_norm


def read_spec(settings: Settings) -> ModelSpec:
    attention = read_attention(settings, head_norm=read_norm(settings))
    return read_decoder(settings, windowed_layers(settings, attention), read_mlp(settings))


FAMILY = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    spec=read_spec,
    defaults={"max_window_layers": 28, "head_dim": 128},
    gguf=(GGUFArchitecture(name="qwen3"),),
)
