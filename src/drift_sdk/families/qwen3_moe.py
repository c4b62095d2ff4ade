"""Qwen3 with experts: Qwen3-30B-A3B and Qwen3-Coder."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import EXPERT_KEYS, EXPERT_MODULES, Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import Attention, Channel, ModelSpec, Router
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_bool,
    read_decoder,
    read_experts,
    read_int,
    read_layer_types,
    read_mlp,
    read_norm,
    read_window,
)


def read_spec(settings: Settings) -> ModelSpec:
    attention = read_attention(settings, head_norm=read_norm(settings))
    return read_decoder(settings, windowed_layers(settings, attention), channels(settings))


def windowed_layers(settings: Settings, attention: Attention) -> list[Attention]:
    """The attention of each layer: with `use_sliding_window`, all have windows unless `layer_types` names
    those that do."""
    window = read_window(settings, is_switched=True)
    windowed = replace(attention, window=window)
    types = read_layer_types(settings, window)
    return [windowed if kind == "sliding_attention" else attention for kind in types]


def channels(settings: Settings) -> list[Channel]:
    """Experts, but MLPs in the layers of `mlp_layers`."""
    router = Router(is_normalised=read_bool(settings, "norm_topk_prob"))
    experts = read_experts(settings, ("num_experts", "num_local_experts"), "moe_intermediate_size", router)
    mlp = read_mlp(settings)
    return [mlp if has_mlp else experts for has_mlp in mlp_layers(settings)]


def mlp_layers(settings: Settings) -> list[bool]:
    """Whether each layer has an MLP: those that `mlp_only_layers` names, and those that
    `decoder_sparse_step` leaves out."""
    step = read_int(settings, "decoder_sparse_step")
    named = settings.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int and layer >= 0 for layer in named):
        raise ModelLoadError(f"config: mlp_only_layers={short_repr(named)}: expected numbers of layers")

    dense = frozenset(named)
    num_layers = read_int(settings, "num_hidden_layers")
    return [index in dense or (index + 1) % step != 0 for index in range(num_layers)]


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    values = file.values
    return {
        "num_experts": values.get("expert_count"),
        "num_experts_per_tok": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
        "intermediate_size": values.get("expert_feed_forward_length"),  # no layer has an MLP
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,  # not in files: llama.cpp does it for this architecture
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    spec=read_spec,
    defaults={
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    gguf=(
        GGUFArchitecture(
            name="qwen3moe",
            layer_modules=EXPERT_MODULES,
            keys=("expert_count",),
            required=EXPERT_KEYS,
            settings=gguf_settings,
        ),
    ),
)
