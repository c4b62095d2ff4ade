"""Qwen3-Next, whose files have the projections of each key head of a state together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drift_sdk.families.qwen3_5 import (
    DEFAULTS,
    MTP,
    STATE_TENSORS,
    UNREAD,
    gguf_change,
    read_hybrid,
    with_mtp,
)
from drift_sdk.families.qwen3_5_moe import (
    EXPERT_DEFAULTS,
    SHARED_KEYS,
    SHARED_MODULES,
    expert_change,
    expert_settings,
    read_shared_experts,
)
from drift_sdk.families.qwen3_moe import mlp_layers
from drift_sdk.spec.family import Family, GGUFArchitecture, GGUFChange, GGUFSettings
from drift_sdk.spec.model import ExpertNames, MlpNames, ModelSpec, Names, Router
from drift_sdk.spec.settings import Settings, read_bool, read_mlp

SPLIT = "has_split_projections"
"""A setting that GGUF files get: they have the gate of the output apart, and the rows of all key heads in
order."""
NUM_PREDICTING = "num_nextn_predict_layers"
"""A setting that published files do not have: they have one such layer."""
NAMES = Names(experts=ExpertNames(shared=MlpNames(module="shared_expert")), mtp=MTP, unread=UNREAD)


def read_spec(settings: Settings) -> ModelSpec:
    router = Router(is_normalised=read_bool(settings, "norm_topk_prob"))
    experts, mlp = read_shared_experts(settings, router), read_mlp(settings)
    channels = [mlp if has_mlp else experts for has_mlp in mlp_layers(settings)]
    is_split = read_bool(settings, SPLIT)
    spec = read_hybrid(settings, channels, names=NAMES, has_fused_qkvz=not is_split, has_fused_ba=True)
    return with_mtp(settings, spec, experts, number=NUM_PREDICTING)


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    return expert_settings(file) | {
        SPLIT: any(name.endswith(".attn_qkv.weight") for name in file.tensors),
        NUM_PREDICTING: file.values.get("nextn_predict_layers", 0),
        "norm_topk_prob": True,  # not in files: llama.cpp does it for this architecture
    }


def next_change(name: str, settings: Mapping[str, Any]) -> GGUFChange:
    return expert_change(name, gguf_change(name, settings))


FAMILY = Family(
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM", "Qwen3NextModel"),
    spec=read_spec,
    defaults=DEFAULTS
    | EXPERT_DEFAULTS
    | {
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        NUM_PREDICTING: 1,
        "decoder_sparse_step": 1,
    },
    gguf=(
        GGUFArchitecture(
            name="qwen3next",
            layer_modules=SHARED_MODULES
            | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
            layer_tensors=STATE_TENSORS,
            mtp=lambda _: MTP,
            is_partial=True,
            change=next_change,
            keys=("expert_count",),
            required=SHARED_KEYS,
            settings=gguf_settings,
        ),
    ),
)
