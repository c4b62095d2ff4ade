"""The text part of Qwen3-VL. Its rotation has sections of positions, which are the same for text."""

from __future__ import annotations

from drift_sdk.spec.family import Family, GGUFArchitecture
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    read_num_layers,
)


def read_spec(settings: Settings) -> ModelSpec:
    attention = read_attention(settings, head_norm=read_norm(settings))
    return read_decoder(settings, [attention] * read_num_layers(settings), read_mlp(settings))


FAMILY = Family(
    model_type="qwen3_vl_text",
    architectures=("Qwen3VLTextModel",),
    spec=read_spec,
    outer=("Qwen3VLForConditionalGeneration",),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0},
    gguf=(GGUFArchitecture(name="qwen3vl"),),
)
