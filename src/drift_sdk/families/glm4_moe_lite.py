"""GLM-4.7-Flash: the layers of DeepSeek-V3 in other sizes."""

from __future__ import annotations

from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families.deepseek_v3 import (
    LATENT_DEFAULTS,
    check_router,
    dense_first,
    read_latent_decoder,
)
from drift_sdk.families.glm4_moe import read_glm_experts, with_mtp
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import Channel, ModelSpec
from drift_sdk.spec.settings import Settings, read_mlp, read_num_layers

KINDS = ("dense", "sparse")


def read_spec(settings: Settings) -> ModelSpec:
    check_router(settings, method="noaux_tc", scores="sigmoid")
    experts = read_glm_experts(settings)
    kinds: Any = settings.get("mlp_layer_types")
    if kinds is None:  # of the first files
        spec = read_latent_decoder(settings, dense_first(settings, experts))
        return with_mtp(settings, spec, experts)

    num_layers = read_num_layers(settings)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in KINDS for kind in kinds):
        expected = f"{num_layers} of {' and '.join(map(repr, KINDS))}"
        raise ModelLoadError(f"config: mlp_layer_types={short_repr(kinds)}: expected {expected}")

    by_kind: dict[str, Channel] = {"dense": read_mlp(settings), "sparse": experts}
    spec = read_latent_decoder(settings, [by_kind[kind] for kind in kinds])
    return with_mtp(settings, spec, experts)


FAMILY = Family(
    model_type="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    spec=read_spec,
    defaults=LATENT_DEFAULTS
    | {
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
)
