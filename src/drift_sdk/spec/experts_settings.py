"""Mixtures of experts, from a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.layer_types import read_num_layers
from drift_sdk.spec.model import ClampedGate, Experts, Mlp, Router
from drift_sdk.spec.settings import read_int

__all__ = ["read_experts"]

MAX_EXPERTS = 1024
MAX_EXPERTS_OF_LAYERS = 2**16
"""Most experts of all layers: files have three tensors for each. Models of 2025 have up to 23,040."""


def read_experts(
    config: Mapping[str, Any],
    numbers: tuple[str, ...],
    size: str,
    router: Router,
    *,
    has_bias: bool = False,
    clamped_gate: ClampedGate | None = None,
    shared: Mlp | None = None,
    has_shared_gate: bool = False,
) -> Experts:
    """The experts of a layer.

    numbers: settings of which the first that is given has the number of experts. size: the setting that has
    the width of each.

    Raises ModelLoadError naming a setting that is missing or out of range.
    """
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"config: hidden_act={short_repr(activation)}: expected 'silu' for experts")

    most = min(MAX_EXPERTS, MAX_EXPERTS_OF_LAYERS // read_num_layers(config))
    number = next((name for name in numbers if config.get(name) is not None), numbers[-1])
    num_experts = read_int(config, number, le=most)
    return Experts(
        num_experts=num_experts,
        num_active=read_int(config, "num_experts_per_tok", le=num_experts),
        intermediate_size=read_int(config, size),
        router=router,
        has_bias=has_bias,
        clamped_gate=clamped_gate,
        shared=shared,
        has_shared_gate=has_shared_gate,
    )
