"""The text part of Qwen3-VL with experts, whose projections files have in one tensor, [experts, in, out]."""

from __future__ import annotations

from drift_sdk.families.qwen3_moe import channels, gguf_settings
from drift_sdk.spec.family import EXPERT_KEYS, EXPERT_MODULES, Family, GGUFArchitecture
from drift_sdk.spec.model import ExpertNames, ModelSpec, Names
from drift_sdk.spec.settings import Settings, read_attention, read_decoder, read_norm, read_num_layers

NAMES = Names(experts=ExpertNames(layout="transposed"))


def read_spec(settings: Settings) -> ModelSpec:
    attention = read_attention(settings, head_norm=read_norm(settings))
    return read_decoder(
        settings,
        [attention] * read_num_layers(settings),
        channels(settings | {"norm_topk_prob": True}),
        names=NAMES,
    )


FAMILY = Family(
    model_type="qwen3_vl_moe_text",
    architectures=("Qwen3VLMoeTextModel",),
    spec=read_spec,
    outer=("Qwen3VLMoeForConditionalGeneration",),
    defaults={
        "num_key_value_heads": 16,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "rope_theta": 500_000.0,
    },
    gguf=(
        GGUFArchitecture(
            name="qwen3vlmoe",
            layer_modules=EXPERT_MODULES,
            keys=("expert_count",),
            required=EXPERT_KEYS,
            settings=gguf_settings,
        ),
    ),
)
