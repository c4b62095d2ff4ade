"""Granite 3."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from drift_sdk.spec.family import Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import (
    Settings,
    attention_layers,
    read_attention,
    read_bool,
    read_decoder,
    read_mlp,
    read_multiplier,
)


def read_spec(settings: Settings) -> ModelSpec:
    scale = read_multiplier(settings, "attention_multiplier")
    attention = replace(read_attention(settings), scale=scale)
    return read_decoder(
        settings,
        attention_layers(settings, attention),
        read_mlp(settings, has_bias=read_bool(settings, "mlp_bias")),
        multiplier=read_multiplier(settings, "residual_multiplier"),
        embedding_multiplier=read_multiplier(settings, "embedding_multiplier"),
        logits_divisor=read_multiplier(settings, "logits_scaling"),
    )


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    head_dim = file.config["head_dim"]
    scale = float(head_dim**-0.5) if isinstance(head_dim, int) and head_dim > 0 else None
    return {
        "attention_multiplier": file.values.get("attention.scale") or scale,
        "embedding_multiplier": file.values.get("embedding_scale") or None,
        "residual_multiplier": file.values.get("residual_scale") or None,
        "logits_scaling": file.values.get("logit_scale") or None,
    }


FAMILY = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    spec=read_spec,
    defaults={"attention_multiplier": 1.0},
    gguf=(
        GGUFArchitecture(
            name="granite",
            is_permuted=True,
            keys=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
            settings=gguf_settings,
        ),
    ),
)
