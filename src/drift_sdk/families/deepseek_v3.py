"""DeepSeek-V3 and R1: latent attention, and experts that a sigmoid router chooses from groups.

GGUF files of DeepSeek-V2 and GLM-4.7-Flash have the same architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families.glm4_moe import (
    ROUTER_TENSORS,
    SHARED_MODULES,
    SIGMOID,
    mtp_names,
    read_glm_experts,
    unread_layers,
    with_mtp,
)
from drift_sdk.spec.family import EXPERT_KEYS, Family, GGUFArchitecture, GGUFJoin, GGUFSettings
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


SOFTMAX = 1
"""The softmax's number in `expert_gating_func` of GGUF files."""
BIAS = ".exp_probs_b.bias"
"""How names of biases of sigmoid routers end in GGUF files."""


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    """Settings of DeepSeek-V2, DeepSeek-V3 or GLM-4.7-Flash: the router says which."""
    values = file.values
    num_groups = values.get("expert_group_count") or 1
    if num_groups != 1 and "expert_group_used_count" not in values:
        raise ModelLoadError(f"{file.place}expert_group_used_count is missing")

    return (
        gguf_router(file, num_groups)
        | gguf_head(file)
        | {
            "num_hidden_layers": file.num_layers,
            "num_nextn_predict_layers": values.get("nextn_predict_layers", 0),
            "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors,
            "rope_parameters": gguf_rope(file),
            "q_lora_rank": values.get("attention.q_lora_rank"),
            "kv_lora_rank": values["attention.kv_lora_rank"],
            "n_routed_experts": values["expert_count"],
            "num_experts_per_tok": values["expert_used_count"],
            "moe_intermediate_size": values["expert_feed_forward_length"],
            "n_shared_experts": values.get("expert_shared_count", 0),
            "first_k_dense_replace": values.get("leading_dense_block_count", 0),
            "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
            "norm_topk_prob": values.get("expert_weights_norm", False),
            "n_group": num_groups,
            "topk_group": 1 if num_groups == 1 else values["expert_group_used_count"],
        }
    )


def gguf_router(file: GGUFSettings, num_groups: Any) -> dict[str, Any]:
    """The family, and how the softmax router of DeepSeek-V2 chooses.

    Files of GLM-4.7-Flash do not name their function of scores, nor do the first ones of DeepSeek-V2, whose
    routers have no biases.
    """
    function = file.values.get("expert_gating_func") or None
    if function == SIGMOID:
        return {}

    if function is None and any(name.endswith(BIAS) for name in file.tensors):
        return {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}

    if function in (None, SOFTMAX):
        method = "greedy" if num_groups == 1 else "group_limited_greedy"
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "topk_method": method,
        }

    found = f"{file.place}expert_gating_func={short_repr(function)}"
    raise ModelLoadError(f"{found}, expected {SOFTMAX}, the softmax, or {SIGMOID}, the sigmoid")


def gguf_head(file: GGUFSettings) -> dict[str, Any]:
    """Sizes of a head. `key_length` and `value_length` are its sizes in files with one matrix of keys and
    values, otherwise the sizes of the one KV head of the absorbed form."""
    end = "_mla" if "attention.key_length_mla" in file.values else ""
    names = (f"attention.key_length{end}", f"attention.value_length{end}", "rope.dimension_count")
    for name in names:
        size = file.values.get(name)
        if type(size) is not int or size < 1:
            raise ModelLoadError(f"{file.place}{name}={short_repr(size)}, expected a positive integer")

    key, value, rotated = (file.values[name] for name in names)
    if key <= rotated:
        raise ModelLoadError(f"{file.place}{names[0]}={key}, expected more than {names[2]}={rotated}")

    return {"qk_nope_head_dim": key - rotated, "qk_rope_head_dim": rotated, "v_head_dim": value}


def gguf_rope(file: GGUFSettings) -> dict[str, Any]:
    values, rope = file.values, dict(file.config["rope_parameters"])
    if rope.get("rope_type") != "yarn":
        return rope

    for name in ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if values.get(name, 1.0) != 1.0:
            raise ModelLoadError(f"{file.place}{name}={short_repr(values[name])} is not implemented")

    # A tenth of `mscale_all_dim`, in float32. Files do not say `mscale`, which in all published models is the
    # same number.
    multiplier = values.get("rope.scaling.yarn_log_multiplier") or 0.0
    weight = round(10 * multiplier, 6) if isinstance(multiplier, float) else multiplier
    return rope | {
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
        "mscale": weight,
        "mscale_all_dim": weight,
    }


def joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """[heads * (columns of keys + rows of values), latent], of keys [heads, latent, columns] and values
    [heads, rows, latent]."""
    keys, values = shapes
    if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
        return None

    return keys[0] * (keys[2] + values[1]), keys[1]


def join_heads(parts: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """The matrices of keys, which files have transposed, and of values, together for each head."""
    keys, values = parts
    heads = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
    return heads.reshape(-1, heads.shape[2])


KEYS_AND_VALUES = GGUFJoin(modules=("attn_k_b", "attn_v_b"), shape=joined_shape, numbers=join_heads)
LATENT_MODULES = SHARED_MODULES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
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
    gguf=(
        GGUFArchitecture(
            name="deepseek2",
            layer_modules=LATENT_MODULES,
            layer_tensors=ROUTER_TENSORS,
            mtp=mtp_names,
            is_partial=True,
            yarn={"rope_type": "yarn"},
            joins={"attn_kv_b": KEYS_AND_VALUES},
            keys=("attention.value_length", "expert_count"),
            required=(*EXPERT_KEYS, "attention.kv_lora_rank"),
            settings=gguf_settings,
        ),
    ),
)
