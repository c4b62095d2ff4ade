"""Gemma 4: layers with a window and layers that see all keys, with heads of two sizes. Also as the text part
of models that read images and audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.decoder_settings import (
    LAYER_TYPES,
    read_activation,
    read_attention,
    read_decoder,
    read_experts,
    read_layer_types,
    read_norm,
    read_num_layers,
    read_window,
)
from drift_sdk.spec.family import Family
from drift_sdk.spec.model import (
    SANDWICH,
    Attention,
    Channel,
    ExpertNames,
    LayerInputs,
    Mlp,
    ModelSpec,
    Norm,
    ParallelExperts,
    Router,
)
from drift_sdk.spec.rope_settings import read_rope
from drift_sdk.spec.settings import Settings, read_bool, read_int, read_multiplier

PERIOD = 6
"""Every sixth layer sees all keys."""
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}
HEADS = ("head_dim", "num_key_value_heads")
SHARED = ("k_proj.", "v_proj.", "k_norm.")
"""Tensors of attention that files may have for layers which do not use them."""


def read_spec(settings: Settings) -> ModelSpec:
    norm, num_layers = read_norm(settings, "wide"), read_num_layers(settings)
    kinds = read_kinds(settings, num_layers)
    num_own = num_layers - read_int(settings, "num_kv_shared_layers", 0, ge=0, le=num_layers - 1)
    by_kind = read_attentions(settings, norm, kinds)
    mixers = [
        replace(by_kind[kind], kv_of=None if index < num_own else last_own(kinds, num_own, kind))
        for index, kind in enumerate(kinds)
    ]
    names = replace(
        SANDWICH,
        experts=ExpertNames(module="", router="router.proj", layout="stacked"),
        unread=tuple(
            f"{SANDWICH.layer.format(index)}.{SANDWICH.attention.module}.{part}"
            for index in range(num_own, num_layers)
            for part in SHARED
        ),
    )
    spec = read_decoder(
        settings,
        mixers,
        [read_channel(settings, norm, index >= num_own) for index in range(num_layers)],
        norm=norm,
        post_norm=norm,
        embedding_multiplier=read_int(settings, "hidden_size") ** 0.5,
        has_rounded_multiplier=True,
        logits_cap=read_cap(settings),
        names=names,
    )
    layers = tuple(replace(layer, has_factor=True) for layer in spec.layers)
    return replace(spec, layers=layers, layer_inputs=read_layer_inputs(settings, norm))


def read_kinds(settings: Settings, num_layers: int) -> list[str]:
    """The kind of each layer; the last one sees all keys."""
    kinds = read_layer_types(settings, read_window(settings), lambda index: (index + 1) % PERIOD != 0)
    return [*kinds[: num_layers - 1], LAYER_TYPES[0]]


def last_own(kinds: list[str], num_own: int, kind: str) -> int:
    """The last of the first `num_own` layers of a kind: later ones attend to its keys and values."""
    found = [index for index in range(num_own) if kinds[index] == kind]
    if not found:
        raise ModelLoadError(
            f"config: num_kv_shared_layers={len(kinds) - num_own}: expected a layer of type {kind!r} before"
        )

    return found[-1]


def read_attentions(settings: Settings, norm: Norm, kinds: Sequence[str]) -> dict[str, Attention]:
    """The attention of each kind of layer: rotation, size and number of KV heads differ."""
    ropes = settings.get("rope_parameters") or ROPES
    if not (isinstance(ropes, Mapping) and all(isinstance(ropes.get(kind), Mapping) for kind in LAYER_TYPES)):
        expected = f"one set for each of {' and '.join(map(repr, LAYER_TYPES))}"
        raise ModelLoadError(f"config: rope_parameters={short_repr(ropes)}: expected {expected}")

    full, windowed = LAYER_TYPES
    has_values = not read_bool(settings, "attention_k_eq_v")
    found = {}
    for kind, own in ((windowed, settings), (full, settings | full_heads(settings, kinds))):
        plain = read_attention(own | {"rope_parameters": None, "rope_scaling": None}, head_norm=norm)
        found[kind] = replace(
            plain,
            scale=1.0,
            rope=read_rope(own | {"rope_parameters": ropes[kind], "rope_scaling": None}, plain.head_dim),
            has_value_norm=True,
        )
    return {
        full: replace(found[full], has_values=has_values),
        windowed: replace(found[windowed], window=read_window(settings)),
    }


def full_heads(settings: Settings, kinds: Sequence[str]) -> dict[str, Any]:
    """Settings of heads that layers without a window have. Files that transformers has written have them for
    each of these layers, or for none if all layers have equal heads."""
    own = settings.get("per_layer_config")
    if own is None:
        heads = {"head_dim": read_int(settings, "global_head_dim")}
        if read_bool(settings, "attention_k_eq_v") and settings.get("num_global_key_value_heads") is not None:
            heads["num_key_value_heads"] = read_int(settings, "num_global_key_value_heads")
        return heads

    if own == {}:
        return {}

    expected = {str(index) for index, kind in enumerate(kinds) if kind == LAYER_TYPES[0]}
    is_known = isinstance(own, Mapping) and {str(name) for name in own} == expected
    first: Any = next(iter(own.values())) if is_known else None
    is_known = isinstance(first, Mapping) and all(each == first for each in own.values())
    if not is_known or not set(first) <= set(HEADS):
        allowed = f"{' and '.join(HEADS)}, equal for all full layers"
        raise ModelLoadError(f"config: per_layer_config={short_repr(own)}: expected {allowed}")

    return dict(first)


def read_channel(settings: Settings, norm: Norm, has_shared_kv: bool) -> Channel:
    """has_shared_kv: of a layer that attends to keys of another one."""
    is_wide = has_shared_kv and read_bool(settings, "use_double_wide_mlp")
    activation = read_activation(settings, "hidden_activation")
    size = read_int(settings, "intermediate_size") * (2 if is_wide else 1)
    mlp = Mlp(intermediate_size=size, activation=activation)
    if not read_bool(settings, "enable_moe_block"):
        return mlp

    experts = read_experts(
        settings | {"hidden_act": "silu"},
        ("num_experts",),
        "moe_intermediate_size",
        Router(input_norm=norm),
        active="top_k_experts",
    )
    return ParallelExperts(mlp=mlp, experts=replace(experts, activation=activation), norm=norm)


def read_cap(settings: Settings) -> float | None:
    name = "final_logit_softcapping"
    return read_multiplier(settings, name) if settings.get(name) is not None else None


def read_layer_inputs(settings: Settings, norm: Norm) -> LayerInputs | None:
    name = "hidden_size_per_layer_input"
    if not settings.get(name):
        return None

    vocab_size, own = read_int(settings, "vocab_size"), read_int(settings, "vocab_size_per_layer_input")
    if own != vocab_size:
        raise ModelLoadError(
            f"config: vocab_size_per_layer_input={own}: expected {vocab_size}, as of vocab_size"
        )

    activation = read_activation(settings, "hidden_activation")
    return LayerInputs(size=read_int(settings, name), norm=norm, activation=activation)


DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
}
FAMILY = Family(
    model_type="gemma4_text",
    architectures=("Gemma4ForCausalLM", "Gemma4TextModel"),
    spec=read_spec,
    outer=("Gemma4ForConditionalGeneration",),
    defaults=DEFAULTS | {"hidden_size_per_layer_input": 256},
)
