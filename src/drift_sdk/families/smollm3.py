"""SmolLM3, some of whose layers have no rotation."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.family import Family, GGUFArchitecture, GGUFSettings
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import (
    Settings,
    read_attention,
    read_bool,
    read_decoder,
    read_int,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_window,
)

GGUF_PERIOD = 4  # every fourth layer has no rotation: files do not say so, and neither do they differ


def read_spec(settings: Settings) -> ModelSpec:
    attention, is_rotated = read_attention(settings), rotated_layers(settings)
    window = read_window(settings, is_switched=True)
    types = read_layer_types(settings, window, lambda index: not is_rotated[index])
    mixers = [
        replace(
            attention,
            window=window if kind == "sliding_attention" else None,
            rope=attention.rope if does_rotate else None,
        )
        for kind, does_rotate in zip(types, is_rotated, strict=True)
    ]
    return read_decoder(settings, mixers, read_mlp(settings, has_bias=read_bool(settings, "mlp_bias")))


def rotated_layers(settings: Settings) -> list[bool]:
    """Whether each layer rotates queries and keys: `no_rope_layers` has 1 for those that do."""
    num_layers, flags = read_num_layers(settings), settings.get("no_rope_layers")
    if flags is None:
        period = read_int(settings, "no_rope_layer_interval")
        return [(layer + 1) % period != 0 for layer in range(num_layers)]

    is_known = isinstance(flags, list) and all(type(flag) is int and flag in (0, 1) for flag in flags)
    if not is_known or len(flags) < num_layers:
        raise ModelLoadError(
            f"config: no_rope_layers={short_repr(flags)}: expected {num_layers} or more of 0 and 1"
        )

    return [flag == 1 for flag in flags[:num_layers]]


def gguf_settings(file: GGUFSettings) -> dict[str, Any]:
    return {"no_rope_layer_interval": GGUF_PERIOD}


FAMILY = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    spec=read_spec,
    defaults={"rope_theta": 2_000_000.0, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    gguf=(GGUFArchitecture(name="smollm3", is_permuted=True, settings=gguf_settings),),
)
