"""Ministral 3 and Devstral Small 2, also as the text part of models that read images."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import (
    Settings,
    attention_layers,
    read_attention,
    read_decoder,
    read_mlp,
    read_query_scaling,
)


def read_spec(settings: Settings) -> ModelSpec:
    attention = replace(read_attention(settings), query_scaling=read_query_scaling(settings))
    return read_decoder(settings, attention_layers(settings, attention), read_mlp(settings))


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    """YaRN, and the scaling of queries."""
    values, rope = file.values, dict(file.config["rope_parameters"])
    if rope.get("rope_type") == "yarn":
        # One number stands for both: files have a magnitude of 1, or of the factor.
        multiplier = values.get("rope.scaling.yarn_log_multiplier") or None
        rope |= {
            "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
            "mscale": multiplier,
            "mscale_all_dim": multiplier,
        }
    beta, context = values.get("attention.temperature_scale"), values.get("attention.temperature_length")
    if beta:
        own = rope.setdefault("original_max_position_embeddings", context)
        if context not in (None, own):
            found = f"{file.place}attention.temperature_length={short_repr(context)}"
            raise ModelLoadError(f"{found}, expected {short_repr(own)}, the context of the rotation")

        rope["llama_4_scaling_beta"] = beta
    return {"rope_parameters": rope}


FAMILY = Family(
    model_type="ministral3",
    architectures=("Ministral3ForCausalLM", "Ministral3Model"),
    spec=read_spec,
    outer=("Mistral3ForConditionalGeneration",),
    defaults={
        "vocab_size": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    gguf=(
        GGUFArchitecture(
            name="mistral3",
            is_permuted=True,
            yarn={"rope_type": "yarn"},
            keys=("attention.sliding_window", "attention.temperature_scale"),
            settings=gguf_settings,
        ),
    ),
)
