"""Gemma 3, also as the text part of models that read images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import SANDWICH_MODULES, Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import SANDWICH, ModelSpec
from drift_sdk.spec.rope import Rope
from drift_sdk.spec.settings import (
    LAYER_TYPES,
    Settings,
    read_attention,
    read_decoder,
    read_int,
    read_layer_types,
    read_mlp,
    read_multiplier,
    read_norm,
    read_num_layers,
    read_rope,
    read_window,
)

LOCAL_THETA = 10_000.0  # transformers' default for layers with a window
# llama.cpp's loader knows the largest model, whose scale is that of another width of heads, by its layers.
LARGEST_LAYERS = 62
MIN_SCALE = 1e-6
"""The least scale of attention."""


def read_spec(settings: Settings) -> ModelSpec:
    norm = read_norm(settings, "offset")
    ropes, window = read_ropes(settings, read_int(settings, "head_dim")), read_window(settings)
    attention = replace(
        read_attention(settings | {"rope_parameters": None, "rope_scaling": None}, head_norm=norm),
        scale=float(read_multiplier(settings, "query_pre_attn_scalar", None) ** -0.5),
    )
    by_type = {
        "full_attention": replace(attention, rope=ropes["full_attention"]),
        "sliding_attention": replace(attention, rope=ropes["sliding_attention"], window=window),
    }
    if settings.get("layer_types") is None:
        period = read_int(settings, "sliding_window_pattern")
        flags = [(index + 1) % period != 0 for index in range(read_num_layers(settings))]
        settings = settings | {"layer_types": [LAYER_TYPES[flag] for flag in flags]}
    return read_decoder(
        settings,
        [by_type[kind] for kind in read_layer_types(settings, window)],
        read_mlp(settings, activation="hidden_activation"),
        norm=norm,
        post_norm=norm,
        embedding_multiplier=read_int(settings, "hidden_size") ** 0.5,
        has_rounded_multiplier=True,
        names=SANDWICH,
    )


def read_ropes(settings: Settings, head_dim: int) -> dict[str, Rope]:
    """The rotation of each kind of layer."""
    nested = settings.get("rope_parameters")
    if nested in (None, {}):
        # Older files scale the full layers alone.
        local = {"rope_theta": settings.get("rope_local_base_freq", LOCAL_THETA)}
        return {
            "full_attention": read_rope(settings, head_dim),
            "sliding_attention": read_rope(Settings(local), head_dim),
        }

    if not (
        isinstance(nested, Mapping) and all(isinstance(nested.get(kind), Mapping) for kind in LAYER_TYPES)
    ):
        expected = f"one set for each of {' and '.join(map(repr, LAYER_TYPES))}"
        raise ModelLoadError(f"config: rope_parameters={short_repr(nested)}: expected {expected}")

    defaults = {"full_attention": settings.get("rope_theta"), "sliding_attention": LOCAL_THETA}
    return {
        kind: read_rope(
            settings | {"rope_scaling": None, "rope_theta": defaults[kind], "rope_parameters": nested[kind]},
            head_dim,
        )
        for kind in LAYER_TYPES
    }


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    """Rotations of both kinds of layers, their pattern, and the scale of attention."""
    values, config = file.values, file.config
    head_dim, scale = config["head_dim"], values.get("attention.scale") or None
    if scale is not None and not (isinstance(scale, float) and MIN_SCALE <= scale <= 1 / MIN_SCALE):
        found = f"{file.place}attention.scale={short_repr(scale)}"
        raise ModelLoadError(f"{found}, expected {MIN_SCALE} to {1 / MIN_SCALE:g}")

    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    if values.get("block_count") == LARGEST_LAYERS and isinstance(hidden_size, int) and num_heads:
        head_dim = hidden_size // num_heads

    pattern = values.get("attention.sliding_window_pattern")
    # Models without windows have neither a window nor a pattern.
    kinds: dict[str, Any] = {"sliding_window_pattern": pattern if config["sliding_window"] else 1}
    if isinstance(pattern, list):
        kinds = {"layer_types": [LAYER_TYPES[bool(flag)] for flag in pattern]}

    return kinds | {
        "query_pre_attn_scalar": head_dim if scale is None else scale**-2,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_theta": values.get("rope.freq_base_swa", LOCAL_THETA)},
        },
    }


FAMILY = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    spec=read_spec,
    outer=("Gemma3ForConditionalGeneration",),
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
    },
    gguf=(
        GGUFArchitecture(
            name="gemma3",
            layer_modules=SANDWICH_MODULES,
            norm_offset=1.0,
            keys=("attention.scale", "attention.sliding_window", "attention.sliding_window_pattern"),
            settings=gguf_settings,
        ),
    ),
)
