"""GLM-4.5, 4.6 and 4.7, and their Air models."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import EXPERT_KEYS, EXPERT_MODULES, Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import Channel, Mlp, ModelSpec, MtpNames, Names, Router
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_bool,
    read_decoder,
    read_experts,
    read_int,
    read_mlp,
    read_multiplier,
    read_norm,
    read_num_layers,
)

SIGMOID = 2
"""The sigmoid's number in `expert_gating_func` of GGUF files."""
SHARED_MODULES = EXPERT_MODULES | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
ROUTER_TENSORS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
MAX_MTP_LAYERS = 16


def read_spec(settings: Settings) -> ModelSpec:
    has_head_norm = read_bool(settings, "use_qk_norm")
    attention = read_attention(
        settings,
        has_output_bias=False,
        head_norm=read_norm(settings) if has_head_norm else None,
        may_be_partial=True,
    )
    num_layers = read_num_layers(settings)
    num_dense = min(read_int(settings, "first_k_dense_replace", ge=0), num_layers)
    experts = read_glm_experts(settings)
    channels = [read_mlp(settings)] * num_dense + [experts] * (num_layers - num_dense)
    spec = read_decoder(settings, [attention] * num_layers, channels, names=unread_layers(settings))
    return with_mtp(settings, spec, experts)


def read_num_predicting(settings: Settings) -> int:
    """The number of layers that predict more tokens."""
    return read_int(settings, "num_nextn_predict_layers", 0, ge=0, le=MAX_MTP_LAYERS)


def unread_layers(settings: Settings) -> Names:
    """Names of a decoder, which does not read the layers that predict more tokens: files have them behind the
    others."""
    num_layers = read_num_layers(settings)
    behind = range(num_layers, num_layers + read_num_predicting(settings))
    return Names(unread=tuple(f"{Names().layer.format(index)}." for index in behind))


def with_mtp(settings: Settings, spec: ModelSpec, experts: Channel) -> ModelSpec:
    """The spec with the layer that predicts one more token, where files have one such layer: it is like the
    decoder's layers with experts.

    Its output is the next row's feature after its norm, as in transformers and SGLang. vLLM hands it on
    before the norm for `glm4_moe` and `glm4_moe_lite`, and after it for `deepseek_v3`.
    """
    if read_num_predicting(settings) != 1:
        return spec

    mtp = replace(spec.layers[0], channel=experts)
    return replace(spec, mtp=mtp, names=replace(spec.names, mtp=mtp_names(spec.num_layers)))


def mtp_names(num_layers: int) -> MtpNames:
    """Names of the layer behind the others."""
    layer = Names().layer.format(num_layers)
    return MtpNames(
        joint=f"{layer}.eh_proj.weight",
        embedding_norm=f"{layer}.enorm.weight",
        hidden_norm=f"{layer}.hnorm.weight",
        layer=layer,
        final_norm=f"{layer}.shared_head.norm.weight",
        embedding=f"{layer}.embed_tokens.weight",
        head=f"{layer}.shared_head.head.weight",
    )


def read_groups(settings: Settings) -> tuple[int, int]:
    """The number of groups of experts, and of those that take part in a choice."""
    num_experts = read_int(settings, "n_routed_experts")
    num_groups = read_int(settings, "n_group")
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        expected = f"a divisor of {num_experts} experts that leaves two or more in a group"
        raise ModelLoadError(f"config: n_group={num_groups}: expected {expected}")

    num_active_groups = read_int(settings, "topk_group", le=num_groups)
    most = num_experts // num_groups * num_active_groups
    num_active = read_int(settings, "num_experts_per_tok")
    if num_active > most:
        raise ModelLoadError(
            f"config: num_experts_per_tok={num_active}: expected at most {most}, the experts of "
            f"topk_group={num_active_groups} groups"
        )

    return num_groups, num_active_groups


def read_glm_experts(settings: Settings) -> Channel:
    num_groups, num_active_groups = read_groups(settings)
    router = Router(
        kind="sigmoid",
        is_normalised=read_bool(settings, "norm_topk_prob"),
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


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    values = file.values
    if values.get("expert_gating_func", SIGMOID) != SIGMOID:
        found = f"{file.place}expert_gating_func={short_repr(values['expert_gating_func'])}"
        raise ModelLoadError(f"{found}, expected {SIGMOID}, the sigmoid")

    return {
        "num_hidden_layers": file.num_layers,
        "num_nextn_predict_layers": values.get("nextn_predict_layers", 0),
        "rope_parameters": file.partial_rope,
        "n_routed_experts": values.get("expert_count"),
        "num_experts_per_tok": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
        "n_shared_experts": values.get("expert_shared_count", 0),
        "first_k_dense_replace": values.get("leading_dense_block_count", 0),
        "routed_scaling_factor": values.get("expert_weights_scale") or None,
        "norm_topk_prob": values.get("expert_weights_norm"),
        "n_group": values.get("expert_group_count") or None,
        "topk_group": values.get("expert_group_used_count") or None,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


FAMILY = Family(
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    spec=read_spec,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    gguf=(
        GGUFArchitecture(
            name="glm4moe",
            layer_modules=SHARED_MODULES | {"post_attention_norm": "post_attention_layernorm"},
            layer_tensors=ROUTER_TENSORS,
            mtp=mtp_names,
            is_partial=True,
            keys=("expert_count",),
            required=EXPERT_KEYS,
            settings=gguf_settings,
        ),
    ),
)
