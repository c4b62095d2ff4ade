"""Rotary position embedding: frequencies, their scalings, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError

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


class LinearScaling(Struct, frozen=True, kw_only=True):
    """Every frequency divided by `factor`."""

    factor: float

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / self.factor


class Llama3Scaling(Struct, frozen=True, kw_only=True):
    """Llama 3.1: wavelengths beyond the original context are divided by `factor`, short ones kept, and those
    between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        is_long = wavelengths > context / self.low_freq_factor
        is_short = wavelengths < context / self.high_freq_factor
        scaled = torch.where(is_long, frequencies / self.factor, frequencies)
        keep = (context / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - keep) * scaled / self.factor + keep * scaled
        return torch.where(is_long | is_short, scaled, blended)


class FrequencyFactors(Struct, frozen=True, kw_only=True):
    """Frequency i divided by `factors[i]`: how GGUF files carry Llama 3.1's scaling, already worked out."""

    factors: tuple[float, ...]

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / torch.tensor(self.factors, dtype=torch.float32, device="cpu")


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


def rope_from_hf(config: Mapping[str, Any], head_dim: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters`, or from `rope_theta` and `rope_scaling` in older files.

    Raises ModelLoadError for a rope type that is not implemented or lacks a setting.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
        raise ModelLoadError(f"config: rope settings {settings!r}: expected one flat set for all layers")

    theta = _number({"rope_theta": config.get("rope_theta") or DEFAULT_THETA} | dict(settings), "rope_theta")
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise ModelLoadError(f"config: partial_rotary_factor={share!r}: only 1.0 is implemented")

    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type == "default":
        return theta, None

    if rope_type == "linear":
        return theta, LinearScaling(factor=_number(settings, "factor"))

    if rope_type == "llama3":
        original = config.get("original_max_position_embeddings")
        original = original or settings.get("original_max_position_embeddings")
        original = original or config.get("max_position_embeddings")
        context = _number({"original_max_position_embeddings": original}, "original_max_position_embeddings")
        low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
        if low >= high:
            raise ModelLoadError(f"config: low_freq_factor={low}: expected less than high_freq_factor={high}")

        scaling = Llama3Scaling(
            factor=_number(settings, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=int(context),
        )
        return theta, scaling

    if rope_type == "factors":
        factors = tuple(float(factor) for factor in settings.get("factors", ()))
        if len(factors) != head_dim // 2 or not all(math.isfinite(f) and f > 0 for f in factors):
            raise ModelLoadError(f"config: {len(factors)} rope factors: expected {head_dim // 2} above zero")

        return theta, FrequencyFactors(factors=factors)

    raise ModelLoadError(f"config: rope_type={rope_type!r}: expected default, linear or llama3")


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians a position, [head_dim / 2], float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (theta**exponents)
    return frequencies if scaling is None else scaling.apply(frequencies)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, head_dim] for `rotate`, for positions [N]."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [N, num_heads, head_dim] turned by their positions; element i pairs with i + head_dim / 2."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


def _number(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ModelLoadError(f"config: {name}={value!r} in the rope settings: expected a number above zero")

    return float(value)
