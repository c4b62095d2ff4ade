"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from msgspec.structs import replace

from drift_sdk.spec.family import Family, GGUFArchitecture
from drift_sdk.spec.model import Attention, ModelSpec
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_decoder,
    read_int,
    read_layer_types,
    read_mlp,
    read_window,
)


def read_spec(settings: Settings) -> ModelSpec:
    attention = read_attention(settings, has_bias=True, has_output_bias=False)
    return read_decoder(settings, windowed_layers(settings, attention), read_mlp(settings))


def windowed_layers(settings: Settings, attention: Attention) -> list[Attention]:
    """The attention of each layer: with `use_sliding_window`, layers from `max_window_layers` on have
    windows."""
    window = read_window(settings, is_switched=True)
    first = 0 if window is None else read_int(settings, "max_window_layers", ge=0)
    types = read_layer_types(settings, window, lambda index: index >= first)
    windowed = replace(attention, window=window)
    return [windowed if kind == "sliding_attention" else attention for kind in types]


FAMILY = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    spec=read_spec,
    defaults={"max_window_layers": 28},
    gguf=(GGUFArchitecture(name="qwen2"),),
)
