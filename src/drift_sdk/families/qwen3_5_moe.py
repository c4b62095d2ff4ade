"""Qwen3.5 and 3.6 with experts, one of them shared. Also as the text part of models that read images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from drift_sdk.families.qwen3_5 import (
    DEFAULTS,
    MTP,
    STATE_KEYS,
    STATE_MODULES,
    STATE_TENSORS,
    UNREAD,
    gguf_settings,
    gguf_tiled_change,
    read_hybrid,
    with_mtp,
)
from drift_sdk.spec.family import (
    EXPERT_KEYS,
    EXPERT_MODULES,
    Family,
    GGUFArchitecture,
    GGUFChange,
    GGUFSettings,
)
from drift_sdk.spec.model import ExpertNames, Experts, Mlp, MlpNames, ModelSpec, Names, Router
from drift_sdk.spec.settings import Settings, read_experts, read_int

NAMES = Names(
    experts=ExpertNames(layout="stacked", shared=MlpNames(module="shared_expert")), mtp=MTP, unread=UNREAD
)


def read_spec(settings: Settings) -> ModelSpec:
    experts = read_shared_experts(settings, Router())
    return with_mtp(settings, read_hybrid(settings, experts, names=NAMES), experts)


def read_shared_experts(settings: Settings, router: Router) -> Experts:
    return read_experts(
        settings,
        ("num_experts", "num_local_experts"),
        "moe_intermediate_size",
        router,
        shared=Mlp(intermediate_size=read_int(settings, "shared_expert_intermediate_size")),
        has_shared_gate=True,
    )


def expert_settings(file: GGUFSettings) -> dict[str, Any]:
    values = file.values
    return gguf_settings(file) | {
        "num_experts": values.get("expert_count"),
        "num_experts_per_tok": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": values.get("expert_shared_feed_forward_length"),
    }


def expert_change(name: str, change: GGUFChange) -> GGUFChange:
    """Files may have the gate of the shared expert without the dimension of one."""
    if not name.endswith(".shared_expert_gate.weight"):
        return change

    return replace(change, shape=lambda shape: (1, *shape) if len(shape) == 1 else shape)


def gguf_change(name: str, settings: Mapping[str, Any]) -> GGUFChange:
    return expert_change(name, gguf_tiled_change(name, settings))


SHARED_KEYS = (*EXPERT_KEYS, "expert_shared_feed_forward_length", *STATE_KEYS)
SHARED_MODULES = (
    EXPERT_MODULES
    | STATE_MODULES
    | {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
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
    gguf=(
        GGUFArchitecture(
            name="qwen35moe",
            layer_modules=SHARED_MODULES,
            layer_tensors=STATE_TENSORS,
            mtp=lambda _: MTP,
            is_partial=True,
            change=gguf_change,
            keys=("expert_count",),
            required=SHARED_KEYS,
            settings=expert_settings,
        ),
    ),
)
