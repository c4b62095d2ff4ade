"""Qwen3.5, 3.6 and 3.8: three layers with a state to one of attention. Also as the text part of models that
read images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import LAYER_MODULES, Family, GGUFArchitecture, GGUFChange, GGUFSettings, Tiles
from drift_sdk.spec.model import Attention, Channel, GatedDelta, Mixer, ModelSpec, MtpNames, Names, Norm
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_bool,
    read_decoder,
    read_int,
    read_mlp,
    read_norm,
    read_num_layers,
)

MTP = MtpNames(
    joint="mtp.fc.weight",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    layer="mtp.layers.0",
    final_norm="mtp.norm.weight",
)
UNREAD = ("mtp.",)
"""The layer that predicts one more token is no part of the decoder."""
NAMES = Names(mtp=MTP, unread=UNREAD)
KINDS = ("linear_attention", "full_attention")
MAX_HEADS, MAX_DIM = 1024, 1024
"""Of recurrent layers."""

STATE_KEYS = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
)
"""Metadata of GGUF files with recurrent layers."""
STATE_MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
STATE_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
QKV_TENSORS = ("in_proj_qkv.weight", "conv1d.weight")
VALUE_TENSORS = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
"""Tensors whose rows are all of value heads."""


def read_spec(settings: Settings) -> ModelSpec:
    mlp = read_mlp(settings)
    return with_mtp(settings, read_hybrid(settings, mlp, names=NAMES), mlp)


def with_mtp(
    settings: Settings, spec: ModelSpec, channel: Channel, *, number: str = "mtp_num_hidden_layers"
) -> ModelSpec:
    """The spec with the layer that predicts one more token, where files have one that shares the embedding:
    it is like the decoder's layers of attention, with a channel of its own.

    number: the setting that says how many such layers there are.
    """
    num_layers = read_int(settings, number, 0, ge=0)
    if num_layers != 1 or read_bool(settings, "mtp_use_dedicated_embeddings"):
        return spec

    layer = next(layer for layer in spec.layers if isinstance(layer.mixer, Attention))
    return replace(spec, mtp=replace(layer, channel=channel))


def read_hybrid(
    settings: Settings,
    channels: Channel | Sequence[Channel],
    *,
    names: Names,
    **fused: bool,
) -> ModelSpec:
    """A decoder with these channels. fused: fields of GatedDelta."""
    if settings.get("attn_output_gate") is False:
        raise ModelLoadError("config: attn_output_gate=False is not implemented")

    norm = read_norm(settings, "offset")
    attention = replace(
        read_attention(settings, head_norm=norm, may_be_partial=True),
        has_gate=True,
        is_gate_interleaved=True,
    )
    by_kind: dict[str, Mixer] = {
        "full_attention": attention,
        "linear_attention": replace(read_gated_delta(settings), **fused),
    }
    mixers = [by_kind[kind] for kind in read_kinds(settings)]
    return read_decoder(settings, mixers, channels, norm=norm, names=names)


def read_gated_delta(settings: Settings) -> GatedDelta:
    num_key_heads = read_int(settings, "linear_num_key_heads", le=MAX_HEADS)
    num_value_heads = read_int(settings, "linear_num_value_heads", le=MAX_HEADS)
    if num_value_heads % num_key_heads:
        found = f"linear_num_value_heads={num_value_heads}"
        raise ModelLoadError(f"config: {found}: expected a multiple of linear_num_key_heads={num_key_heads}")

    return GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=read_int(settings, "linear_key_head_dim", le=MAX_DIM),
        value_dim=read_int(settings, "linear_value_head_dim", le=MAX_DIM),
        conv_width=read_int(settings, "linear_conv_kernel_dim", ge=2, le=16),
        norm=Norm(read_norm(settings).eps),
    )


def read_kinds(settings: Settings) -> list[str]:
    """The kind of each layer: `layer_types`, else every `full_attention_interval`-th one has attention."""
    num_layers = read_num_layers(settings)
    kinds = settings.get("layer_types")
    if kinds is None:
        period = read_int(settings, "full_attention_interval")
        kinds = [KINDS[(index + 1) % period == 0] for index in range(num_layers)]

    is_known = isinstance(kinds, list) and all(kind in KINDS for kind in kinds)
    if not is_known or len(kinds) != num_layers or KINDS[1] not in kinds:
        expected = f"{num_layers} of {' and '.join(map(repr, KINDS))}, one of attention among them"
        raise ModelLoadError(f"config: layer_types={short_repr(kinds)}: expected {expected}")

    return list(kinds)


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    values = file.values
    for key in STATE_KEYS:
        if type(values[key]) is not int or values[key] < 1:
            raise ModelLoadError(f"{file.place}{key}={short_repr(values[key])}, expected a positive integer")

    conv_width, key_dim, num_key_heads, num_value_heads, size = (values[key] for key in STATE_KEYS)
    if size % num_value_heads:
        found = f"{file.place}ssm.inner_size={size}"
        raise ModelLoadError(f"{found}, expected a multiple of ssm.time_step_rank={num_value_heads}")

    return {
        "num_hidden_layers": file.num_layers,
        "mtp_num_hidden_layers": values.get("nextn_predict_layers", 0),
        "mtp_use_dedicated_embeddings": any(".nextn.embed_tokens." in name for name in file.tensors),
        "rope_parameters": file.partial_rope,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "full_attention_interval": values.get("full_attention_interval"),
        "linear_conv_kernel_dim": conv_width,
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_value_head_dim": size // num_value_heads,
    }


def gguf_change(name: str, _: Mapping[str, Any]) -> GGUFChange:
    """Files have -exp(A_log), 1 + weight of all norms but those of recurrent outputs, and weights of the
    convolution without the dimension of one."""
    part = name.rpartition(".linear_attn.")[2]
    if part == "A_log":
        return GGUFChange(numbers=lambda rates: np.log(-rates))

    if part == "conv1d.weight":
        return GGUFChange(shape=lambda shape: (*shape[:1], 1, *shape[1:]))

    is_mtp_norm = name in (MTP.embedding_norm, MTP.hidden_norm)
    if is_mtp_norm or (part.endswith("norm.weight") and part != "norm.weight"):
        return GGUFChange(numbers=lambda weights: weights - 1)

    return GGUFChange()


def gguf_tiled_change(name: str, settings: Mapping[str, Any]) -> GGUFChange:
    """The same, and value head j of key head k is number j * num_key_heads + k."""
    change, part = gguf_change(name, settings), name.rpartition(".linear_attn.")[2]
    num_key_heads = settings["linear_num_key_heads"]
    tiles = Tiles(settings["linear_num_value_heads"] // num_key_heads, num_key_heads)
    if part in QKV_TENSORS:
        return replace(change, rows=tiles, first_row=2 * num_key_heads * settings["linear_key_head_dim"])

    if part in VALUE_TENSORS:
        return replace(change, rows=tiles)

    return replace(change, columns=tiles) if part == "out_proj.weight" else change


DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
FAMILY = Family(
    model_type="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    spec=read_spec,
    outer=("Qwen3_5ForConditionalGeneration",),
    defaults=DEFAULTS | {"num_key_value_heads": 4},
    gguf=(
        GGUFArchitecture(
            name="qwen35",
            layer_modules=LAYER_MODULES | STATE_MODULES,
            layer_tensors=STATE_TENSORS,
            mtp=lambda _: MTP,
            is_partial=True,
            change=gguf_tiled_change,
            required=STATE_KEYS,
            settings=gguf_settings,
        ),
    ),
)
