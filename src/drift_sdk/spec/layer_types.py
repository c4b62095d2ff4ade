"""Kinds of attention of a decoder's layers, from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.model import Attention, Mixer
from drift_sdk.spec.rope import Rope, YarnScaling
from drift_sdk.spec.settings import MAX_CONTEXT, MIN_CONTEXT, read_bool, read_int

__all__ = [
    "LAYER_TYPES",
    "read_context",
    "read_layer_types",
    "read_num_layers",
    "read_window",
    "with_windows",
]

MAX_LAYERS = 1024
LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")


def read_num_layers(config: Mapping[str, Any]) -> int:
    return read_int(config, "num_hidden_layers", le=MAX_LAYERS)


def read_window(config: Mapping[str, Any], *, is_switched: bool = False) -> int | None:
    """The window of windowed layers; None if it is not in use.

    is_switched: it takes effect only with `use_sliding_window`; else also if the config does not have that.
    """
    if config.get("sliding_window") is None:
        return None

    if not read_bool(config, "use_sliding_window") and (is_switched or "use_sliding_window" in config):
        return None

    return read_int(config, "sliding_window", le=MAX_CONTEXT)


def read_layer_types(
    config: Mapping[str, Any], window: int | None, is_windowed: Callable[[int], bool] | None = None
) -> list[LayerType]:
    """The kind of attention of each layer: `layer_types`, else is_windowed(index) says whether a layer has
    the window that is in use; None: all have it.

    Raises ModelLoadError for windowed layers without a window.
    """
    num_layers = read_num_layers(config)
    types: Any = config.get("layer_types")
    if types is None:
        has_window = (lambda _: True) if is_windowed is None else is_windowed
        types = [LAYER_TYPES[window is not None and has_window(index)] for index in range(num_layers)]

    is_known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
    if not is_known or len(types) != num_layers:
        expected = f"{num_layers} of {' and '.join(map(repr, LAYER_TYPES))}"
        raise ModelLoadError(f"config: layer_types={short_repr(types)}: expected {expected}")

    if window is None and "sliding_attention" in types:
        found = f"sliding_window={short_repr(config.get('sliding_window'))}"
        raise ModelLoadError(f"config: {found} is not in use: expected one for 'sliding_attention' layers")

    return list(types)


def read_context(config: Mapping[str, Any], mixers: Sequence[Mixer]) -> int:
    """The model's context, in tokens. With YaRN it is what the scaling reaches, also if
    `max_position_embeddings` is less: model cards that add YaRN leave it as it is."""
    context = read_int(config, "max_position_embeddings", ge=MIN_CONTEXT, le=MAX_CONTEXT)
    return max([context, *(_reach(mixer.rope) for mixer in mixers if isinstance(mixer, Attention))])


def _reach(rope: Rope | None) -> int:
    """Tokens that a scaling of the rotation reaches, where it says so."""
    return rope.scaling.context if rope is not None and isinstance(rope.scaling, YarnScaling) else 0


def with_windows(mixers: Sequence[Mixer], context: int) -> list[Mixer]:
    """The mixers without windows that the model's context never fills: these have no effect."""
    return [
        replace(mixer, window=None)
        if isinstance(mixer, Attention) and mixer.window is not None and mixer.window >= context
        else mixer
        for mixer in mixers
    ]
