"""Qwen3.5 and 3.6 with experts, one of them shared. Also as the text part of models that read images."""

from __future__ import annotations

from drift_sdk.families.qwen3_5 import DEFAULTS, MTP, UNREAD, read_hybrid, with_mtp
from drift_sdk.spec.experts_settings import read_experts
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import Experts, Mlp, ModelSpec, Router
from drift_sdk.spec.names import ExpertNames, MlpNames, Names
from drift_sdk.spec.settings import Settings, read_int

NAMES = Names(
    experts=ExpertNames(layout="stacked", shared=MlpNames(module="shared_expert")), mtp=MTP, unread=UNREAD
)


def read_spec(settings: Settings) -> ModelSpec:
    spec = read_hybrid(settings, read_shared_experts(settings, Router()), names=NAMES)
    return with_mtp(settings, spec)


def read_shared_experts(settings: Settings, router: Router) -> Experts:
    return read_experts(
        settings,
        ("num_experts", "num_local_experts"),
        "moe_intermediate_size",
        router,
        shared=Mlp(intermediate_size=read_int(settings, "shared_expert_intermediate_size")),
        has_shared_gate=True,
    )


EXPERT_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    spec=read_spec,
    outer=("Qwen3_5MoeForConditionalGeneration",),
    defaults=DEFAULTS
    | EXPERT_DEFAULTS
    | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
)
