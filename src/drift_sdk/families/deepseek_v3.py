"""DeepSeek-V3 and R1: latent attention, and experts that a sigmoid router chooses from groups."""

from __future__ import annotations

from collections.abc import Sequence

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families.glm4_moe import read_glm_experts, unread_layers, with_mtp
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import Channel, LatentAttention, ModelSpec, Norm
from drift_sdk.spec.settings import (
    MAX_SIZE,
    Settings,
    read_bool,
    read_decoder,
    read_int,
    read_mlp,
    read_num_layers,
    read_rope,
    read_score_factor,
)

LATENT_NORM = Norm(1e-6)
"""Of latents, whatever the other norms of a model are."""


def read_spec(settings: Settings) -> ModelSpec:
    check_router(settings, method="noaux_tc", scores="sigmoid")
    experts = read_glm_experts(settings)
    return with_mtp(settings, read_latent_decoder(settings, dense_first(settings, experts)), experts)


def check_router(settings: Settings, *, method: str, scores: str) -> None:
    """Raise ModelLoadError for another router, where files say which one they have."""
    for name, expected in (("topk_method", method), ("scoring_func", scores), ("moe_layer_freq", 1)):
        if settings.get(name, expected) != expected:
            raise ModelLoadError(f"config: {name}={short_repr(settings[name])}: expected {expected!r}")


def dense_first(settings: Settings, experts: Channel) -> list[Channel]:
    """The channels of all layers: MLPs in the first ones."""
    num_layers = read_num_layers(settings)
    num_dense = min(read_int(settings, "first_k_dense_replace", ge=0), num_layers)
    return [read_mlp(settings)] * num_dense + [experts] * (num_layers - num_dense)


def read_latent_decoder(settings: Settings, channels: Sequence[Channel]) -> ModelSpec:
    """A decoder with latent attention in all layers."""
    mixers = [read_latent(settings)] * read_num_layers(settings)
    return read_decoder(settings, mixers, channels, names=unread_layers(settings))


def read_latent(settings: Settings) -> LatentAttention:
    num_heads = read_int(settings, "num_attention_heads")
    plain, rotated, output, latent = (
        read_int(settings, name)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    if rotated % 2:
        raise ModelLoadError(f"config: qk_rope_head_dim={rotated}: expected an even number")

    if num_heads * max(plain + output, latent + rotated) > MAX_SIZE:
        raise ModelLoadError(
            f"config: num_attention_heads={num_heads}: expected at most "
            f"{MAX_SIZE // max(plain + output, latent + rotated)} of these sizes"
        )

    return LatentAttention(
        num_heads=num_heads,
        plain_dim=plain,
        output_dim=output,
        latent_dim=latent,
        query_rank=None if settings.get("q_lora_rank") is None else read_int(settings, "q_lora_rank"),
        scale=float((plain + rotated) ** -0.5) * read_score_factor(settings),
        rope=read_rope(settings, rotated),
        norm=LATENT_NORM,
        is_interleaved=read_bool(settings, "rope_interleave"),
        has_bias=read_bool(settings, "attention_bias"),
    )


LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}
FAMILY = Family(
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    spec=read_spec,
    defaults=LATENT_DEFAULTS
    | {
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
)
