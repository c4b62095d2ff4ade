"""Names of the tensors of a decoder in files. The defaults are the names of Llama at Hugging Face."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from drift_sdk.spec.settings import check_choice

__all__ = [
    "SANDWICH",
    "AttentionNames",
    "ExpertLayout",
    "ExpertNames",
    "GatedDeltaNames",
    "MlpNames",
    "MtpNames",
    "Names",
]

ExpertLayout = Literal["each", "stacked", "transposed", "mxfp4"]
"""Form of the experts' projections in files. "each": a tensor for each expert and projection. "stacked": one
tensor for all experts [num_experts, out, in], gate and up in one. "transposed": likewise,
[num_experts, in, out]. "mxfp4": likewise, as MXFP4 blocks and scales."""


class AttentionNames(Struct, frozen=True, kw_only=True):
    """fused: name of query, key and value projections as one tensor; None: they are apart. query_norm,
    key_norm: of heads."""

    module: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    gate: str = "gate_proj"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    fused: str | None = None


class GatedDeltaNames(Struct, frozen=True, kw_only=True):
    """qkvz, ba: names of projections that files have fused."""

    module: str = "linear_attn"
    qkv: str = "in_proj_qkv"
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    qkvz: str = "in_proj_qkvz"
    ba: str = "in_proj_ba"
    conv: str = "conv1d"
    decay: str = "A_log"
    step: str = "dt_bias"
    norm: str = "norm"
    output: str = "out_proj"


class MlpNames(Struct, frozen=True, kw_only=True):
    """fused: name of gate and up projections as one tensor; None: they are apart."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str | None = None


class ExpertNames(Struct, frozen=True, kw_only=True):
    """Names inside `module`. correction: of a sigmoid router. gate_up: of both projections in one tensor."""

    module: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    shared: MlpNames = MlpNames(module="shared_experts")
    shared_gate: str = "shared_expert_gate"
    layout: ExpertLayout = "each"

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ExpertLayout)


class MtpNames(Struct, frozen=True, kw_only=True):
    """Names of the layer that predicts one more token (MTP), and of what is around it. layer: prefix of its
    tensors, inside which names are those of other layers."""

    joint: str = "mtp.fc.weight"
    embedding_norm: str = "mtp.pre_fc_norm_embedding.weight"
    hidden_norm: str = "mtp.pre_fc_norm_hidden.weight"
    layer: str = "mtp.layers.0"
    final_norm: str = "mtp.norm.weight"


class Names(Struct, frozen=True, kw_only=True):
    """layer: prefix of the tensors of layer {}. The names of norms are inside it. mtp: of the layer that
    `ModelSpec.mtp` describes. unread: prefixes of tensors that the decoder does not read."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}"
    mixer_norm: str = "input_layernorm"
    mixer_post_norm: str = ""
    channel_norm: str = "post_attention_layernorm"
    channel_post_norm: str = ""
    attention: AttentionNames = AttentionNames()
    gated_delta: GatedDeltaNames = GatedDeltaNames()
    mlp: MlpNames = MlpNames()
    experts: ExpertNames = ExpertNames()
    mtp: MtpNames = MtpNames()
    unread: tuple[str, ...] = ()


SANDWICH = Names(
    mixer_post_norm="post_attention_layernorm",
    channel_norm="pre_feedforward_layernorm",
    channel_post_norm="post_feedforward_layernorm",
)
"""Names of layers that also normalise the outputs of mixer and channel."""
