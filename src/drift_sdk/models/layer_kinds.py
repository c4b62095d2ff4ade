"""Differences between a decoder's layers, from its config.json: attention windows and rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.models.rope import Rope, YarnScaling
from drift_sdk.models.rope_config import rope_from_hf
from drift_sdk.models.settings import MAX_CONTEXT, MIN_CONTEXT, read_bool, read_int

__all__ = ["LayerKinds", "layer_kinds_from_hf"]

MAX_LAYERS = 1024
LOCAL_THETA = 10_000.0  # transformers' default for the windowed layers of Gemma 3
LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")
# Families whose window takes effect only with `use_sliding_window`.
SWITCHED = ("qwen2", "qwen3", "qwen3_moe", "smollm3")


class LayerKinds(Struct, frozen=True, kw_only=True):
    """Fields `windows`, `ropes` and `layer_ropes` of a DecoderConfig.

    context: the model's context, in tokens. With YaRN it is what the scaling reaches, also if the config's
             `max_position_embeddings` is less: model cards that add YaRN leave it as it is.
    """

    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int | None, ...]
    context: int


def layer_kinds_from_hf(
    config: Mapping[str, Any], family: str, head_dim: int, max_model_len: int | None
) -> LayerKinds:
    """The kinds of all layers. `family` is the model_type; `max_model_len` as in DecoderConfig.from_hf.

    Raises ModelLoadError naming a setting that is missing, out of range or not implemented.
    """
    num_layers = read_int(config, "num_hidden_layers", le=MAX_LAYERS)
    is_rotated = _rotated_layers(config, num_layers) if family == "smollm3" else [True] * num_layers
    window = _window(config, family)
    types = _layer_types(config, family, window, is_rotated)
    if window is None and "sliding_attention" in types:
        found = f"sliding_window={short_repr(config.get('sliding_window'))}"
        raise ModelLoadError(f"config: {found} is not in use: expected one for 'sliding_attention' layers")

    by_type = _ropes(config, family, head_dim, max_model_len)
    used = [
        by_type[kind] if does_rotate else None for kind, does_rotate in zip(types, is_rotated, strict=True)
    ]
    ropes = tuple(dict.fromkeys(rope for rope in used if rope is not None))
    # A window that the model's context never fills has no effect.
    context = read_int(config, "max_position_embeddings", ge=MIN_CONTEXT, le=MAX_CONTEXT)
    context = max([context, *map(_reach, ropes)])
    effective = window if window is not None and window < context else None
    return LayerKinds(
        windows=tuple(effective if kind == "sliding_attention" else None for kind in types),
        ropes=ropes,
        layer_ropes=tuple(None if rope is None else ropes.index(rope) for rope in used),
        context=context,
    )


def _reach(rope: Rope) -> int:
    """Tokens that a scaling of the rotation reaches, where it says so."""
    return rope.scaling.context if isinstance(rope.scaling, YarnScaling) else 0


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """The window of windowed layers; None if it is not in use."""
    if config.get("sliding_window") is None:
        return None

    if not read_bool(config, "use_sliding_window") and (family in SWITCHED or "use_sliding_window" in config):
        return None

    return read_int(config, "sliding_window", le=MAX_CONTEXT)


def _layer_types(
    config: Mapping[str, Any], family: str, window: int | None, is_rotated: list[bool]
) -> list[LayerType]:
    """The kind of attention of each layer: `layer_types`, else the family's own rule."""
    num_layers = len(is_rotated)
    types = config.get("layer_types")
    if types is not None:
        is_known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
        if not is_known or len(types) != num_layers:
            expected = f"{num_layers} of {' and '.join(map(repr, LAYER_TYPES))}"
            raise ModelLoadError(f"config: layer_types={short_repr(types)}: expected {expected}")

        return list(types)

    if window is None and family != "gemma3_text":
        return ["full_attention"] * num_layers

    is_windowed = [True] * num_layers
    if family in ("qwen2", "qwen3"):
        first = read_int(config, "max_window_layers", ge=0)
        is_windowed = [layer >= first for layer in range(num_layers)]
    elif family == "smollm3":
        is_windowed = [not does_rotate for does_rotate in is_rotated]
    elif family == "gpt_oss":
        is_windowed = [layer % 2 == 0 for layer in range(num_layers)]
    elif family == "gemma3_text":
        period = read_int(config, "sliding_window_pattern")
        is_windowed = [(layer + 1) % period != 0 for layer in range(num_layers)]

    return [LAYER_TYPES[windowed] for windowed in is_windowed]


def _rotated_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer of a SmolLM3 rotates queries and keys: `no_rope_layers` has 1 for those that do."""
    flags = config.get("no_rope_layers")
    if flags is None:
        period = read_int(config, "no_rope_layer_interval")
        return [(layer + 1) % period != 0 for layer in range(num_layers)]

    is_known = isinstance(flags, list) and all(type(flag) is int and flag in (0, 1) for flag in flags)
    if not is_known or len(flags) < num_layers:
        raise ModelLoadError(
            f"config: no_rope_layers={short_repr(flags)}: expected {num_layers} or more of 0 and 1"
        )

    return [flag == 1 for flag in flags[:num_layers]]


def _ropes(
    config: Mapping[str, Any], family: str, head_dim: int, max_model_len: int | None
) -> dict[LayerType, Rope]:
    """The rotation of each kind of layer."""
    if family != "gemma3_text":
        rope = rope_from_hf(config, head_dim, may_be_partial=family == "phi3", max_model_len=max_model_len)
        return dict.fromkeys(LAYER_TYPES, rope)

    nested = config.get("rope_parameters")
    if nested in (None, {}):
        # Older files scale the full layers alone.
        local = {"rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
        return {
            "full_attention": rope_from_hf(config, head_dim, max_model_len=max_model_len),
            "sliding_attention": rope_from_hf(local, head_dim),
        }

    if not (
        isinstance(nested, Mapping) and all(isinstance(nested.get(kind), Mapping) for kind in LAYER_TYPES)
    ):
        expected = f"one set for each of {' and '.join(map(repr, LAYER_TYPES))}"
        raise ModelLoadError(f"config: rope_parameters={short_repr(nested)}: expected {expected}")

    defaults = {"full_attention": config.get("rope_theta"), "sliding_attention": LOCAL_THETA}
    return {
        kind: rope_from_hf(
            {**config, "rope_scaling": None, "rope_theta": defaults[kind], "rope_parameters": nested[kind]},
            head_dim,
            max_model_len=max_model_len,
        )
        for kind in LAYER_TYPES
    }
