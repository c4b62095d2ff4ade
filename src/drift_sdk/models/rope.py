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
from drift_sdk.models.settings import MAX_CONTEXT, read_number

__all__ = [
    "FrequencyFactors",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Rope",
    "RopeScaling",
    "half_tables",
    "inverse_frequencies",
    "rope_from_hf",
    "rotary_tables",
    "rotate",
]

DEFAULT_THETA = 10_000.0
# Allowed ranges. Beyond them, frequencies in float32 would be zero, infinite or NaN.
THETAS = (1.0, 1e30)
FACTORS = (1e-6, 1e30)
MAGNITUDES = (1e-3, 1e3)
IN_ROPE = " in the rope settings"
LONG_ROPE_TYPES = ("longrope", "su")  # "su": the first files of Phi-3


class LinearScaling(Struct, frozen=True, kw_only=True):
    """All frequencies are divided by `factor`."""

    factor: float

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        return 1.0 / periods / self.factor


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

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        context = self.original_max_position_embeddings
        frequencies = 1.0 / periods
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

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        return 1.0 / periods / torch.tensor(self.factors, dtype=torch.float32, device="cpu")


class LongRopeScaling(Struct, frozen=True, kw_only=True):
    """The scaling of Phi-3 (LongRoPE, arXiv 2402.13753): frequency i is divided by `factors[i]`, and all
    cosines and sines are multiplied by `magnitude`.

    A model has two sets of factors. transformers changes to the long set when a sequence outgrows the
    context of pretraining. Here the longest sequence that the engine allows decides, so that the keys of a
    position do not depend on the tokens after it.
    """

    factors: tuple[float, ...]
    magnitude: float

    def frequencies(self, periods: torch.Tensor) -> torch.Tensor:
        """Scaled frequencies [rotary_dim / 2], from the positions per radian of each pair."""
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32, device="cpu") * periods)


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors | LongRopeScaling


class Rope(Struct, frozen=True, kw_only=True):
    """A rotation of queries and keys.

    theta:       the base of the frequencies.
    rotary_dim:  the first so many elements of a head are rotated, in pairs of i and i + rotary_dim / 2.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    @property
    def magnitude(self) -> float:
        """The factor of all cosines and sines."""
        return self.scaling.magnitude if isinstance(self.scaling, LongRopeScaling) else 1.0

    def frequencies(self) -> torch.Tensor:
        """The angle of each pair of elements per position, in radians: [rotary_dim / 2], float32 on the
        CPU."""
        return inverse_frequencies(self.rotary_dim, self.theta, self.scaling)


def rope_from_hf(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    may_be_partial: bool = False,
    max_model_len: int | None = None,
) -> Rope:
    """The rotation that a config.json describes: in `rope_parameters`, or in `rope_theta` and `rope_scaling`
    in older files.

    may_be_partial:  `partial_rotary_factor` is read; else only 1.0 is accepted.
    max_model_len:   length of the longest sequence, in tokens; None: the model's context.

    Raises ModelLoadError for a rope type that is not implemented, and for a setting that is missing or out of
    range.
    """
    settings = _settings(config)
    rotary_dim = _rotary_dim(config, settings, head_dim, may_be_partial=may_be_partial)
    theta = DEFAULT_THETA
    for source in (settings, config):
        if source.get("rope_theta") is not None:
            theta = read_number(source, "rope_theta", ge=THETAS[0], le=THETAS[1], place=IN_ROPE)
            break

    scaling = _scaling(config, settings, rotary_dim, max_model_len)
    return Rope(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def _rotary_dim(
    config: Mapping[str, Any], settings: Mapping[str, Any], head_dim: int, *, may_be_partial: bool
) -> int:
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share in (None, 1, 1.0):
        return head_dim

    found = f"partial_rotary_factor={short_repr(share)}"
    if not may_be_partial:
        raise ModelLoadError(f"config: {found}: only 1.0 is implemented for this architecture")

    rotary_dim = int(head_dim * share) if _is_number(share) and 0 < share <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        expected = f"a number up to 1 that leaves an even number of a head's {head_dim} elements"
        raise ModelLoadError(f"config: {found}: expected {expected}")

    return rotary_dim


def _scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], rotary_dim: int, max_model_len: int | None
) -> RopeScaling | None:
    rope_type = _first_given(settings, "rope_type", "type")
    if rope_type in (None, "default"):
        return None

    if rope_type == "linear":
        return LinearScaling(factor=_factor(settings, "factor"))

    if rope_type == "llama3":
        return _llama3_scaling(config, settings)

    if rope_type in LONG_ROPE_TYPES:
        return _long_rope_scaling(config, settings, rotary_dim // 2, max_model_len)

    if rope_type == "factors":
        return FrequencyFactors(factors=_factors(settings, "factors", rotary_dim // 2))

    raise ModelLoadError(
        f"config: rope_type={short_repr(rope_type)}: expected default, linear, llama3 or longrope"
    )


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's table of rope settings, empty if it has none."""
    given = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    settings: Any = next((settings for settings in given if settings not in (None, {})), {})
    if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
        raise ModelLoadError(
            f"config: rope settings {short_repr(settings)}: expected one flat set for all layers"
        )

    return settings


def _llama3_scaling(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Llama3Scaling:
    low, high = _factor(settings, "low_freq_factor"), _factor(settings, "high_freq_factor")
    if low >= high:
        raise ModelLoadError(f"config: low_freq_factor={low}: expected less than high_freq_factor={high}")

    return Llama3Scaling(
        factor=_factor(settings, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_context(config, settings, ge=1),
    )


def _long_rope_scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], num_factors: int, max_model_len: int | None
) -> LongRopeScaling:
    context = _original_context(config, settings, ge=2)
    whole = int(read_number(config, "max_position_embeddings", ge=2, le=MAX_CONTEXT))
    short, long = (_factors(settings, f"{name}_factor", num_factors) for name in ("short", "long"))
    factor = read_number(settings, "factor", whole / context, ge=FACTORS[0], le=FACTORS[1], place=IN_ROPE)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return LongRopeScaling(
        factors=long if (max_model_len or whole) > context else short,
        magnitude=read_number(
            settings, "attention_factor", magnitude, ge=MAGNITUDES[0], le=MAGNITUDES[1], place=IN_ROPE
        ),
    )


def _original_context(config: Mapping[str, Any], settings: Mapping[str, Any], *, ge: int) -> int:
    """Tokens of context in pretraining."""
    name = "original_max_position_embeddings"
    given = (config.get(name), settings.get(name), config.get("max_position_embeddings"))
    context = next((value for value in given if value is not None), None)
    return int(read_number({name: context}, name, ge=ge, le=MAX_CONTEXT, place=IN_ROPE))


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """The angle of each pair of elements per position, in radians: [rotary_dim / 2], float32 on the CPU."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    periods = theta**exponents
    return 1.0 / periods if scaling is None else scaling.frequencies(periods)


def half_tables(rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, rotary_dim / 2] of positions [N], on their device: the table of the kernels."""
    frequencies = rope.frequencies().to(positions.device)
    return _cos_sin(positions.to(torch.float32)[:, None] * frequencies, dtype, rope.magnitude)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, rotary_dim] for `rotate`, of positions [N] and frequencies [rotary_dim / 2],
    multiplied by `magnitude`.

    The first half of the sines is negated, as `rotate` needs them.
    """
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = _cos_sin(angles, dtype, magnitude)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _cos_sin(angles: torch.Tensor, dtype: torch.dtype, magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [N, num_heads, head_dim] with their first elements rotated by the angles of `rotary_tables`, as
    many as the tables have. Of these, element i forms a pair with element i + rotary_dim / 2."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)

    swapped = x.roll(rotary_dim // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


def _first_given(settings: Mapping[str, Any], *names: str) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), None)


def _factor(settings: Mapping[str, Any], name: str) -> float:
    return read_number(settings, name, ge=FACTORS[0], le=FACTORS[1], place=IN_ROPE)


def _factors(settings: Mapping[str, Any], name: str, num_factors: int) -> tuple[float, ...]:
    """One factor for each pair of elements."""
    factors = settings.get(name)
    low, high = FACTORS
    if (
        not isinstance(factors, list)
        or len(factors) != num_factors
        or not all(_is_number(factor) and low <= factor <= high for factor in factors)
    ):
        found, expected = (
            f"rope {name} {short_repr(factors)}",
            f"{num_factors} numbers from {low:g} to {high:g}",
        )
        raise ModelLoadError(f"config: {found}: expected {expected}")

    return tuple(map(float, factors))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
