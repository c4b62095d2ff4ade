"""DeepSeek-V2 and V2-Lite: latent attention, and experts by a softmax of all, perhaps from groups."""

from __future__ import annotations

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families.deepseek_v3 import LATENT_DEFAULTS, check_router, dense_first, read_latent_decoder
from drift_sdk.families.glm4_moe import read_groups
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import Experts, Mlp, ModelSpec, Router
from drift_sdk.spec.settings import Settings, read_bool, read_experts, read_int, read_multiplier

METHODS = ("greedy", "group_limited_greedy")


def read_spec(settings: Settings) -> ModelSpec:
    method = settings.get("topk_method")
    if method not in METHODS:
        expected = " or ".join(map(repr, METHODS))
        raise ModelLoadError(f"config: topk_method={short_repr(method)}: expected {expected}")

    check_router(settings, method=method, scores="softmax")
    for name in ("norm_topk_prob", "mlp_bias"):
        if read_bool(settings, name):
            raise ModelLoadError(f"config: {name}=True is not implemented for this architecture")

    return read_latent_decoder(settings, dense_first(settings, read_v2_experts(settings)))


def read_v2_experts(settings: Settings) -> Experts:
    has_groups = settings["topk_method"] == METHODS[1]
    num_groups, num_active_groups = read_groups(settings) if has_groups else (1, 1)
    router = Router(
        kind="wide",
        is_normalised=False,
        scale=read_multiplier(settings, "routed_scaling_factor"),
        num_groups=num_groups,
        num_active_groups=num_active_groups,
    )
    num_shared = read_int(settings, "n_shared_experts", ge=0)
    size = read_int(settings, "moe_intermediate_size")
    return read_experts(
        settings,
        ("n_routed_experts",),
        "moe_intermediate_size",
        router,
        shared=Mlp(intermediate_size=num_shared * size) if num_shared else None,
    )


FAMILY = Family(
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    spec=read_spec,
    defaults=LATENT_DEFAULTS
    | {
        "max_position_embeddings": 2048,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "topk_method": METHODS[0],
    },
)
