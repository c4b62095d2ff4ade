"""The text part of Muse-Glimmer. Layers without a rotation see all keys, the others a window."""

from __future__ import annotations

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import SANDWICH, ModelSpec, Norm
from drift_sdk.spec.settings import (
    MAX_EPS,
    Settings,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_multiplier,
    read_norm,
    read_num_layers,
    read_number,
    read_window,
)

PERIOD = 4
"""Every fourth layer, counted from the last one, has no rotation."""


def read_spec(settings: Settings) -> ModelSpec:
    norm, window = read_norm(settings, "offset"), read_window(settings)
    attention = replace(
        read_attention(settings, head_norm=Norm(norm.eps, "wide")), has_head_weights=False, has_gate=True
    )
    # Queries are multiplied by the factor before the products.
    scale = attention.scale * read_multiplier(settings, "qk_scale_factor")
    num_layers = read_num_layers(settings)
    types = read_layer_types(settings, window, lambda index: (num_layers - 1 - index) % PERIOD != 0)
    mixers = [
        replace(
            attention,
            scale=scale,
            window=window if kind == "sliding_attention" else None,
            rope=attention.rope if does_rotate else None,
        )
        for kind, does_rotate in zip(types, rotated_layers(settings, num_layers), strict=True)
    ]
    return read_decoder(
        settings,
        mixers,
        read_mlp(settings, activation="hidden_activation"),
        norm=norm,
        post_norm=Norm(read_number(settings, "post_norm_eps", ge=0.0, le=MAX_EPS), "offset"),
        final_norm=Norm(norm.eps, "wide"),
        embedding_norm=norm,
        logits_divisor=1.0 / read_multiplier(settings, "output_multiplier"),
        logits_cap=read_multiplier(settings, "final_logit_softcapping"),
        names=SANDWICH,
    )


def rotated_layers(settings: Settings, num_layers: int) -> list[bool]:
    """Whether each layer rotates queries and keys: `layer_rope_theta` has 0 for those that do not."""
    thetas = settings.get("layer_rope_theta")
    if thetas is None:
        return [(num_layers - 1 - index) % PERIOD != 0 for index in range(num_layers)]

    is_known = isinstance(thetas, list) and all(type(theta) in (int, float) for theta in thetas)
    if not is_known or len(thetas) != num_layers:
        found = f"layer_rope_theta={short_repr(thetas)}"
        raise ModelLoadError(f"config: {found}: expected {num_layers} numbers")

    return [theta != 0 for theta in thetas]


FAMILY = Family(
    model_type="muse_glimmer_text",
    architectures=("MuseGlimmerTextModel",),
    spec=read_spec,
    outer=("MuseGlimmerForConditionalGeneration",),
    defaults={
        "vocab_size": 202_048,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_activation": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
    },
)
