"""Mixtral."""

from __future__ import annotations

from typing import Any

from drift_sdk.spec.family import EXPERT_KEYS, LAYER_MODULES, Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import ExpertNames, ModelSpec, Names, Router
from drift_sdk.spec.settings import Settings, attention_layers, read_attention, read_decoder, read_experts

NAMES = Names(experts=ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2"))
PROJECTIONS = {"gate": NAMES.experts.gate, "down": NAMES.experts.down, "up": NAMES.experts.up}
# Old files have a tensor for each expert, like "blk.0.ffn_gate.7.weight".
GGUF_MODULES = (
    LAYER_MODULES
    | {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {
        f"ffn_{name}{suffix}": f"block_sparse_moe.experts.{{}}.{own}"
        for name, own in PROJECTIONS.items()
        for suffix in ("", "_exps")
    }
)


def read_spec(settings: Settings) -> ModelSpec:
    mixers = attention_layers(settings, read_attention(settings))
    numbers = ("num_experts", "num_local_experts")
    experts = read_experts(settings, numbers, "intermediate_size", Router())
    return read_decoder(settings, mixers, experts, names=NAMES)


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    return {
        "num_local_experts": file.values.get("expert_count"),
        "num_experts_per_tok": file.values.get("expert_used_count"),
    }


FAMILY = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    spec=read_spec,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    gguf=(
        GGUFArchitecture(
            name="llama",
            mark="expert_count",
            layer_modules=GGUF_MODULES,
            is_permuted=True,
            keys=("attention.sliding_window", "expert_count"),
            required=EXPERT_KEYS[:2],
            settings=gguf_settings,
        ),
    ),
)
