"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from typing import Any

from drift_sdk.spec.family import LAYER_MODULES, Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import AttentionNames, MlpNames, ModelSpec, Names
from drift_sdk.spec.settings import Settings, attention_layers, read_attention, read_decoder, read_mlp

NAMES = Names(attention=AttentionNames(fused="qkv_proj"), mlp=MlpNames(fused="gate_up_proj"))


def read_spec(settings: Settings) -> ModelSpec:
    mixers = attention_layers(settings, read_attention(settings, may_be_partial=True))
    return read_decoder(settings, mixers, read_mlp(settings), names=NAMES)


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    """The part of a head that is rotated, and LongRoPE."""
    rope, head_dim = file.config["rope_parameters"], file.config["head_dim"]
    if file.rotary_dim != head_dim:
        # Half an element more, so that truncation cannot lose one.
        rope = rope | {"partial_rotary_factor": (file.rotary_dim + 0.5) / head_dim}

    return {
        "original_max_position_embeddings": file.values.get("rope.scaling.original_context_length"),
        "rope_parameters": rope,
    }


FAMILY = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    spec=read_spec,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    gguf=(
        GGUFArchitecture(
            name="phi3",
            layer_modules=LAYER_MODULES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            is_partial=True,
            keys=("attention.sliding_window", "rope.scaling.attn_factor"),
            settings=gguf_settings,
        ),
    ),
)
