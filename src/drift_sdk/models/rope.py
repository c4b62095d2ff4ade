"""Rotary position embedding (RoFormer, arXiv 2104.09864): frequencies, their scaling, and the rotation.

The scalings are those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr

__all__ = [
    "FrequencyFactors",
    "LinearScaling",
    "Llama3Scaling",
    "RopeScaling",
    "inverse_frequencies",
    "rope_from_hf",
    "rotary_tables",
    "rotate",
]

DEFAULT_THETA = 10_000.0
# Allowed ranges. Beyond them, frequencies in float32 would be zero, infinite or NaN.
THETAS = (1.0, 1e30)
FACTORS = (1e-6, 1e30)
MAX_CONTEXT = 2**31 - 1


class LinearScaling(Struct, frozen=True, kw_only=True):
    """All frequencies are divided by `factor`."""

    factor: float

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [head_dim / 2]."""
        return frequencies / self.factor


class Llama3Scaling(Struct, frozen=True, kw_only=True):
    """The scaling of Llama 3.1.

    With c = original_max_position_embeddings, frequencies of wavelengths above c / low_freq_factor are
    divided by `factor`, those of wavelengths below c / high_freq_factor are kept, and those between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [head_dim / 2]."""
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        is_long = wavelengths > context / self.low_freq_factor
        is_short = wavelengths < context / self.high_freq_factor
        scaled = torch.where(is_long, frequencies / self.factor, frequencies)
        keep = (context / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - keep) * scaled / self.factor + keep * scaled
        return torch.where(is_long | is_short, scaled, blended)


class FrequencyFactors(Struct, frozen=True, kw_only=True):
    """Frequency i is divided by `factors[i]`. GGUF files store Llama 3.1's scaling in this form."""

    factors: tuple[float, ...]

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [head_dim / 2]."""
        return frequencies / torch.tensor(self.factors, dtype=torch.float32, device="cpu")


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


def rope_from_hf(config: Mapping[str, Any], head_dim: int) -> tuple[float, RopeScaling | None]:
    """The base theta and the scaling of a config.json: from `rope_parameters`, or from `rope_theta` and
    `rope_scaling` in older files.

    Raises ModelLoadError for a rope type that is not implemented, and for a setting that is missing or out of
    range.
    """
    given = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    settings: Any = next((settings for settings in given if settings not in (None, {})), {})
    if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
        raise ModelLoadError(
            f"config: rope settings {short_repr(settings)}: expected one flat set for all layers"
        )

    theta = DEFAULT_THETA
    for source in (settings, config):
        if source.get("rope_theta") is not None:
            theta = _number(source, "rope_theta", *THETAS)
            break

    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        found = f"partial_rotary_factor={short_repr(share)}"
        raise ModelLoadError(f"config: {found}: only 1.0 is implemented")

    rope_type = _first_given(settings, "rope_type", "type")
    if rope_type in (None, "default"):
        return theta, None

    if rope_type == "linear":
        return theta, LinearScaling(factor=_number(settings, "factor", *FACTORS))

    if rope_type == "llama3":
        return theta, _llama3_scaling(config, settings)

    if rope_type == "factors":
        return theta, FrequencyFactors(factors=_factors(settings.get("factors"), head_dim // 2))

    raise ModelLoadError(f"config: rope_type={short_repr(rope_type)}: expected default, linear or llama3")


def _llama3_scaling(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Llama3Scaling:
    name = "original_max_position_embeddings"
    context = next((value for value in (config.get(name), settings.get(name)) if value is not None), None)
    context = config.get("max_position_embeddings") if context is None else context
    low = _number(settings, "low_freq_factor", *FACTORS)
    high = _number(settings, "high_freq_factor", *FACTORS)
    if low >= high:
        raise ModelLoadError(f"config: low_freq_factor={low}: expected less than high_freq_factor={high}")

    return Llama3Scaling(
        factor=_number(settings, "factor", *FACTORS),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(_number({name: context}, name, 1, MAX_CONTEXT)),
    )


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """The angle of each pair of elements per position, in radians: [head_dim / 2], float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (theta**exponents)
    return frequencies if scaling is None else scaling.apply(frequencies)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, head_dim] for `rotate`, of positions [N] and frequencies [head_dim / 2].

    The first half of the sines is negated, as `rotate` needs them.
    """
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [N, num_heads, head_dim] rotated by the angles of `rotary_tables`. Element i forms a pair with
    element i + head_dim / 2."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


def _first_given(settings: Mapping[str, Any], *names: str) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), None)


def _factors(factors: object, num_factors: int) -> tuple[float, ...]:
    low, high = FACTORS
    if (
        not isinstance(factors, list)
        or len(factors) != num_factors
        or not all(isinstance(factor, float) and low <= factor <= high for factor in factors)
    ):
        found, expected = short_repr(factors), f"{num_factors} numbers from {low:g} to {high:g}"
        raise ModelLoadError(f"config: rope factors {found}: expected {expected}")

    return tuple(factors)


def _number(settings: Mapping[str, Any], name: str, ge: float, le: float) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not ge <= value <= le:
        found, expected = f"{name}={short_repr(value)} in the rope settings", f"from {ge:g} to {le:g}"
        raise ModelLoadError(f"config: {found}: expected a number {expected}")

    return float(value)
