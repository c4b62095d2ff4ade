"""gpt-oss, from files of Hugging Face, GGUF files, and the original ones that OpenAI publishes.

Names and settings of original files: https://github.com/openai/gpt-oss, gpt_oss/torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError
from drift_sdk.spec.family import (
    EXPERT_KEYS,
    LAYER_MODULES,
    Family,
    GGUFArchitecture,
    GGUFSettings,
    OriginalFiles,
)
from drift_sdk.spec.model import AttentionNames, ClampedGate, ExpertNames, ModelSpec, Names, Router
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_bool,
    read_decoder,
    read_experts,
    read_int,
    read_layer_types,
    read_norm,
    read_number,
    read_window,
)

GATE_NUMBERS = (1e-3, 1e6)
MXFP4_BLOCK = 32
FUSED = "has_fused_projections"
"""A setting that original files get: they have query, key and value projections as one tensor."""

ORIGINAL_SETTINGS = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
ORIGINAL_ROPE = {
    "rope_scaling_factor": "factor",
    "rope_ntk_beta": "beta_fast",
    "rope_ntk_alpha": "beta_slow",
    "initial_context_length": "original_max_position_embeddings",
}
VOCAB_SIZE = 201_088
ENDS = [200_002, 199_999, 200_012]
"""The ids of "<|return|>", "<|endoftext|>" and "<|call|>" in the vocabulary of all models."""
ORIGINAL_MODULES = {"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "lm_head"}
ORIGINAL_LAYER_MODULES = {
    "attn.norm": "input_layernorm",
    "attn.qkv": "self_attn.qkv_proj",
    "attn.out": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.router",
}
ORIGINAL_LAYER_TENSORS = {
    "attn.sinks": "self_attn.sinks",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}


def read_spec(settings: Settings) -> ModelSpec:
    is_quantised = bool(settings.get("quantization_config"))
    if is_quantised:
        for name in ("hidden_size", "intermediate_size"):
            if read_int(settings, name) % MXFP4_BLOCK:
                raise ModelLoadError(
                    f"config: {name}={settings[name]}: expected a multiple of {MXFP4_BLOCK} for MXFP4 experts"
                )

    low, high = GATE_NUMBERS
    gate = ClampedGate(
        alpha=read_number(settings, "swiglu_alpha", ge=low, le=high),
        limit=read_number(settings, "swiglu_limit", ge=low, le=high),
    )
    numbers = ("num_experts", "num_local_experts")
    experts = read_experts(settings, numbers, "intermediate_size", Router(), has_bias=True, clamped_gate=gate)
    attention, window = replace(read_attention(settings), has_sinks=True), read_window(settings)
    windowed = replace(attention, window=window)
    types = read_layer_types(settings, window, lambda index: index % 2 == 0)
    return read_decoder(
        settings,
        [windowed if kind == "sliding_attention" else attention for kind in types],
        experts,
        norm=read_norm(settings, "wide"),
        names=Names(
            attention=AttentionNames(fused="qkv_proj" if read_bool(settings, FUSED) else None),
            experts=ExpertNames(router="router", layout="mxfp4" if is_quantised else "transposed"),
        ),
    )


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    return {
        "intermediate_size": file.values.get("expert_feed_forward_length"),
        "num_local_experts": file.values.get("expert_count"),
        "num_experts_per_tok": file.values.get("expert_used_count"),
        "quantization_config": file.config.get("quantization_config", {"quant_method": "mxfp4"}),
    }


def hf_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that Hugging Face's config.json of the same model has.

    Original files do not state the context, which is that of all models, nor the tokens that end an answer,
    which follow from their vocabulary.
    """
    ropes = {name: settings[old] for old, name in ORIGINAL_ROPE.items() if settings.get(old) is not None}
    kept = {
        ORIGINAL_SETTINGS.get(name, name): value
        for name, value in settings.items()
        if name not in ORIGINAL_ROPE
    }
    if kept.get("vocab_size") == VOCAB_SIZE:
        kept.setdefault("eos_token_id", ENDS)
    return kept | {
        "architectures": list(FAMILY.architectures[:1]),
        "model_type": FAMILY.model_type,
        "rope_scaling": {"rope_type": "yarn", "truncate": False, **ropes},
        "quantization_config": {"quant_method": "mxfp4"},
        FUSED: True,
    }


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor of original files; its own name if the model has no such tensor."""
    if match := re.fullmatch(r"block\.([0-9]+)\.(.+)", name):
        prefix, rest = f"model.layers.{match[1]}", match[2]
        if rest in ORIGINAL_LAYER_TENSORS:
            return f"{prefix}.{ORIGINAL_LAYER_TENSORS[rest]}"

        module, _, suffix = rest.rpartition(".")
        found = ORIGINAL_LAYER_MODULES.get(module)
        return name if found is None else f"{prefix}.{found}.{_parameter(suffix)}"

    module, _, suffix = name.rpartition(".")
    return f"{ORIGINAL_MODULES[module]}.{_parameter(suffix)}" if module in ORIGINAL_MODULES else name


def _parameter(name: str) -> str:
    """The name of a parameter of a module. The weights of norms are called scale."""
    return "weight" if name == "scale" else name


YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
FAMILY = Family(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM", "GptOssModel"),
    spec=read_spec,
    has_mxfp4=True,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
        "rope_scaling": YARN | {"factor": 32.0, "original_max_position_embeddings": 4096},
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    gguf=(
        GGUFArchitecture(
            name="gpt-oss",
            layer_modules=LAYER_MODULES
            | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
            layer_tensors={"attn_sinks.weight": "self_attn.sinks"},
            keys=("attention.sliding_window", "expert_count"),
            required=(*EXPERT_KEYS, "attention.sliding_window"),
            yarn=YARN,
            settings=gguf_settings,
        ),
    ),
    original=OriginalFiles(
        marks=("experts_per_token", "initial_context_length", "rope_ntk_alpha"),
        settings=hf_settings,
        tensor_name=hf_name,
    ),
)
