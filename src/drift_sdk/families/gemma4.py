"""Gemma 4: layers with a window and layers that see all keys, with heads of two sizes. Also as the text part
of models that read images and audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import MODULES, SANDWICH_MODULES, Family, GGUFArchitecture, GGUFSettings
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
from drift_sdk.spec.settings import (
    LAYER_TYPES,
    Settings,
    read_activation,
    read_attention,
    read_bool,
    read_decoder,
    read_experts,
    read_int,
    read_layer_types,
    read_multiplier,
    read_norm,
    read_num_layers,
    read_rope,
    read_window,
)

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


GGUF_SIZES = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "feed_forward_length",
)
"""Metadata that files have."""
GGUF_EXPERTS = ("expert_used_count", "expert_feed_forward_length")
GGUF_LOCAL = ("attention.value_length_swa", "rope.dimension_count_swa")
"""The width of heads of layers with a window, again."""
UNROTATED = 1e29
"""In GGUF files, the least factor of frequencies of elements that are not rotated."""


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    """Lists of the file have an entry for each layer."""
    values = file.values
    flags = values["attention.sliding_window_pattern"]
    is_known = isinstance(flags, list) and flags and all(flag in (0, 1) for flag in flags)
    if not is_known or len(flags) != file.num_layers:
        found = f"{file.place}attention.sliding_window_pattern={short_repr(flags)}"
        expected = f"true or false for each of {short_repr(file.num_layers)} layers"
        raise ModelLoadError(f"{found}, expected {expected}")

    for key in GGUF_LOCAL:
        if values.get(key, values["attention.key_length_swa"]) != values["attention.key_length_swa"]:
            found = f"{file.place}{key}={short_repr(values[key])}"
            raise ModelLoadError(f"{found}, expected {short_repr(values['attention.key_length_swa'])}")

    full = [index for index, flag in enumerate(flags) if not flag or index == len(flags) - 1]
    local = [index for index in range(len(flags)) if index not in full]
    heads = {
        "head_dim": values["attention.key_length"],
        "num_key_value_heads": gguf_entry(file, "attention.head_count_kv", full),
    }
    has_experts = bool(values.get("expert_count"))
    for key in GGUF_EXPERTS if has_experts else ():
        if key not in values:
            raise ModelLoadError(f"{file.place}{key} is missing")

    return gguf_widths(file, len(flags)) | {
        "layer_types": [LAYER_TYPES[bool(flag)] for flag in flags],
        "head_dim": values["attention.key_length_swa"],
        "num_key_value_heads": gguf_entry(file, "attention.head_count_kv", local or full),
        "per_layer_config": {str(index): heads for index in full},
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "final_logit_softcapping": values.get("final_logit_softcapping") or None,
        "hidden_size_per_layer_input": values.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.config["vocab_size"],
        "enable_moe_block": has_experts,
        "num_experts": values.get("expert_count"),
        "top_k_experts": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
        "rope_parameters": {
            "sliding_attention": ROPES["sliding_attention"]
            | {"rope_theta": values.get("rope.freq_base_swa", ROPES["sliding_attention"]["rope_theta"])},
            "full_attention": gguf_rope(file),
        },
    }


def gguf_entry(file: GGUFSettings, key: str, layers: Sequence[int]) -> Any:
    """The value at a key that is equal for all these layers."""
    found = file.values[key]
    if not isinstance(found, list):
        return found

    values = {found[index] for index in layers if index < len(found)}
    if len(values) != 1 or len(found) != file.num_layers:
        expected = "one number for layers of a kind"
        raise ModelLoadError(f"{file.place}{key}={short_repr(found)}, expected {expected}")

    return values.pop()


def gguf_widths(file: GGUFSettings, num_layers: int) -> dict[str, Any]:
    """Layers with the keys of others, and the widths of MLPs, which these may have doubled."""
    num_shared = file.values.get("attention.shared_kv_layers", 0)
    if not isinstance(num_shared, int) or not 0 <= num_shared < num_layers:
        found = f"{file.place}attention.shared_kv_layers={short_repr(num_shared)}"
        raise ModelLoadError(f"{found}, expected 0 to {num_layers - 1}")

    num_own = num_layers - num_shared
    width = gguf_entry(file, "feed_forward_length", range(num_own))
    shared = gguf_entry(file, "feed_forward_length", range(num_own, num_layers)) if num_shared else width
    if shared not in (width, 2 * width):
        found = f"{file.place}feed_forward_length of {shared} in the last {num_shared} layers"
        raise ModelLoadError(f"{found}, expected {width} or {2 * width}")

    return {
        "num_kv_shared_layers": num_shared,
        "intermediate_size": width,
        "use_double_wide_mlp": shared != width,
    }


def gguf_rope(file: GGUFSettings) -> dict[str, Any]:
    """The rotation of layers that see all keys, from factors of its frequencies: 1, then UNROTATED."""
    rope = file.config["rope_parameters"]
    factors: list[float] = rope.get("factors", [])
    num_rotated = sum(factor == 1.0 for factor in factors)
    is_cut = set(factors[:num_rotated]) == {1.0} and all(each >= UNROTATED for each in factors[num_rotated:])
    if not is_cut:
        found = f"{file.place}rope_freqs.weight with {short_repr(factors)}"
        raise ModelLoadError(f"{found}, expected 1 for rotated elements, then {UNROTATED:g} or more")

    # Half an element more, so that truncation cannot lose one.
    share = (num_rotated + 0.25) / len(factors) if num_rotated < len(factors) else 1.0
    return {"rope_type": "proportional", "rope_theta": rope["rope_theta"], "partial_rotary_factor": share}


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
    gguf=(
        GGUFArchitecture(
            name="gemma4",
            layer_modules=SANDWICH_MODULES
            | {
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "ffn_gate_inp": "router.proj",
                "ffn_gate_exps": "experts.{}.gate_proj",
                "ffn_up_exps": "experts.{}.up_proj",
                "ffn_down_exps": "experts.{}.down_proj",
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
            },
            layer_tensors={
                "layer_output_scale.weight": "layer_scalar",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
            },
            modules=MODULES
            | {
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
            },
            keys=(
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "expert_count",
                "final_logit_softcapping",
            ),
            required=GGUF_SIZES,
            settings=gguf_settings,
        ),
    ),
)
