"""Qwen3-Next, whose files have the projections of each key head of a state together."""

from __future__ import annotations

from drift_sdk.families.qwen3_5 import DEFAULTS, UNREAD, read_hybrid
from drift_sdk.families.qwen3_5_moe import EXPERT_DEFAULTS, read_shared_experts
from drift_sdk.families.qwen3_moe import mlp_layers
from drift_sdk.spec.decoder_settings import read_mlp
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import ModelSpec, Router
from drift_sdk.spec.names import ExpertNames, MlpNames, Names
from drift_sdk.spec.settings import Settings, read_bool

NAMES = Names(experts=ExpertNames(shared=MlpNames(module="shared_expert")), unread=UNREAD)


def read_spec(settings: Settings) -> ModelSpec:
    router = Router(is_normalised=read_bool(settings, "norm_topk_prob"))
    experts, mlp = read_shared_experts(settings, router), read_mlp(settings)
    channels = [mlp if has_mlp else experts for has_mlp in mlp_layers(settings)]
    return read_hybrid(settings, channels, names=NAMES, has_fused_qkvz=True, has_fused_ba=True)


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
        "decoder_sparse_step": 1,
    },
)
