"""Rotations of queries and keys, from a model's config.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.model import QueryScaling
from drift_sdk.spec.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from drift_sdk.spec.settings import MAX_CONTEXT, Settings, read_bool, read_number

__all__ = ["check_rope_fields", "read_query_scaling", "read_rope", "read_score_factor", "rope_table"]

DEFAULT_THETA = 10_000.0
# Allowed ranges. Beyond them, frequencies in float32 would be zero, infinite or NaN.
THETAS = (1.0, 1e30)
FACTORS = (1e-6, 1e30)
MAGNITUDES = (1e-3, 1e3)
IN_ROPE = " in the rope settings"
LONG_ROPE_TYPES = ("longrope", "su")  # "su": the first files of Phi-3
FIELDS = ("rope_parameters", "rope_scaling")
BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
"""Settings of `rope_parameters` that older files have outside `rope_scaling`."""
READ = (
    *("rope_type", "type", "factor", "factors", "original_max_position_embeddings", *BESIDE_SCALING),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
    *("attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("full_attention", "sliding_attention"),
    *("llama_4_scaling_beta", "max_position_embeddings", "mrope_section", "mrope_interleaved"),
)
"""Settings that some kind of rotation has. Those of sections (M-RoPE) have no effect on text, whose positions
are the same in all sections."""

log = logging.getLogger("drift_sdk")


def check_rope_fields(config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if `rope_parameters` and `rope_scaling` of a config.json contradict each other:
    transformers takes the second then, other readers the first.

    Logs a warning that names settings which no rotation has: they have no effect.
    """
    parameters, scaling = (config.get(name) for name in FIELDS)
    unread = sorted(_unread(parameters) | _unread(scaling))
    if unread:
        log.warning("the config has rope settings without effect: %s", short_repr(unread))

    if parameters in (None, {}) or scaling in (None, {}):
        return

    # In a file with a set for each kind of layer, `rope_scaling` is that of the full ones.
    is_nested = isinstance(parameters, Mapping) and isinstance(parameters.get("full_attention"), Mapping)
    if not _are_same(parameters["full_attention"] if is_nested else parameters, scaling):
        found = ", ".join(f"{name}={short_repr(config[name])}" for name in FIELDS)
        raise ModelLoadError(f"config: {found}: expected one of them, or the same settings in both")


def _unread(settings: object) -> set[str]:
    """Names of settings that no rotation has, also of those for each kind of layer."""
    if not isinstance(settings, Mapping):
        return set()

    tables = [settings, *(inner for inner in settings.values() if isinstance(inner, Mapping))]
    return {name for table in tables for name in table if name not in READ}


def _are_same(parameters: object, scaling: object) -> bool:
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        return False

    rotations = [
        {name: value for name, value in settings.items() if value is not None and name != "type"}
        | {"rope_type": _first_given(settings, "rope_type", "type") or "default"}
        for settings in (parameters, scaling)
    ]
    for name in BESIDE_SCALING:
        if any(name not in rotation for rotation in rotations):
            rotations = [{key: rotation[key] for key in rotation if key != name} for rotation in rotations]
    return rotations[0] == rotations[1]


def read_rope(settings: Settings, head_dim: int, *, may_be_partial: bool = False) -> Rope:
    """The rotation that a config.json describes: in `rope_parameters`, or in `rope_theta` and `rope_scaling`
    in older files.

    may_be_partial: `partial_rotary_factor` is read; else only 1.0 is accepted.

    Raises ModelLoadError for a rope type that is not implemented, and for a setting that is missing or out of
    range.
    """
    table = rope_table(settings)
    is_proportional = _first_given(table, "rope_type", "type") == "proportional"
    rotary_dim = _rotary_dim(settings, table, head_dim, may_be_partial=may_be_partial or is_proportional)
    theta = DEFAULT_THETA
    for source in (table, settings):
        if source.get("rope_theta") is not None:
            theta = read_number(source, "rope_theta", ge=THETAS[0], le=THETAS[1], place=IN_ROPE)
            break

    if is_proportional:
        factor = read_number(table, "factor", 1.0, ge=FACTORS[0], le=FACTORS[1], place=IN_ROPE)
        proportional = ProportionalScaling(num_pairs=rotary_dim // 2, factor=factor)
        return Rope(theta=theta, rotary_dim=head_dim, scaling=proportional)

    if _first_given(table, "rope_type", "type") == "yarn":
        scaling: RopeScaling | None = _yarn_scaling(settings, table, rotary_dim, theta)
    else:
        scaling = _scaling(settings, table, rotary_dim, settings.max_model_len)
    return Rope(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def read_score_factor(settings: Settings) -> float:
    """What the scale of latent attention is multiplied by with a scaling of the rotation: the square of the
    magnitude that `mscale_all_dim` gives; 1.0 without."""
    table = rope_table(settings)
    weight = read_number(table, "mscale_all_dim", 0.0, ge=0.0, le=MAGNITUDES[1], place=IN_ROPE)
    if _first_given(table, "rope_type", "type") in (None, "default") or not weight:
        return 1.0

    return _magnitude_of(weight, _factor(table, "factor")) ** 2


def read_query_scaling(settings: Settings) -> QueryScaling | None:
    """The scaling of queries by their positions, in `rope_parameters`; None without."""
    table = rope_table(settings)
    if table.get("llama_4_scaling_beta") is None:
        return None

    beta = read_number(table, "llama_4_scaling_beta", ge=0.0, le=MAGNITUDES[1], place=IN_ROPE)
    return QueryScaling(beta, _original_context(settings, table, ge=1)) if beta else None


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

    if rope_type == "dynamic":
        # It changes frequencies with the length of a sequence, but not up to the context of the config.
        _factor(settings, "factor")
        return None

    if rope_type == "linear":
        return LinearScaling(factor=_factor(settings, "factor"))

    if rope_type == "llama3":
        return _llama3_scaling(config, settings)

    if rope_type in LONG_ROPE_TYPES:
        return _long_rope_scaling(config, settings, rotary_dim // 2, max_model_len)

    if rope_type == "factors":
        return FrequencyFactors(factors=_factors(settings, "factors", rotary_dim // 2))

    known = "default, dynamic, linear, llama3, longrope, proportional or yarn"
    raise ModelLoadError(f"config: rope_type={short_repr(rope_type)}: expected {known}")


def rope_table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's table of rope settings, empty if it has none."""
    given = [config.get(name) for name in FIELDS]
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


def _yarn_scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], rotary_dim: int, theta: float
) -> YarnScaling:
    """YaRN's scaling. `first` is the pair that turns beta_fast times over the context of pretraining, `last`
    that which turns beta_slow times. Without `attention_factor`, the magnitude is that of the factor, times
    `attn_factor`, as in vLLM."""
    context = _original_context(config, settings, ge=2)
    whole = read_number(config, "max_position_embeddings", ge=2, le=MAX_CONTEXT)
    low, high = FACTORS
    ratio = whole / context if whole > context else None
    factor = read_number(settings, "factor", ratio, ge=low, le=high, place=IN_ROPE)
    fast, slow = (
        read_number(settings, name, default, ge=low, le=high, place=IN_ROPE)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if theta == 1.0:
        raise ModelLoadError("config: rope_theta=1.0: expected more than 1 for YaRN")

    def pair(num_turns: float) -> float:
        return rotary_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(fast), pair(slow)
    if settings.get("truncate") is None or read_bool(settings, "truncate"):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, float(rotary_dim - 1))
    if first > last:
        raise ModelLoadError(f"config: beta_fast={fast}: expected at least beta_slow={slow}{IN_ROPE}")

    return YarnScaling(
        factor=factor,
        first=first,
        last=last if last > first else first + 0.001,
        magnitude=read_number(
            settings,
            "attention_factor",
            _yarn_magnitude(settings, factor) * _magnitude(settings, "attn_factor"),
            ge=MAGNITUDES[0],
            le=MAGNITUDES[1],
            place=IN_ROPE,
        ),
        context=int(min(factor * context, MAX_CONTEXT)),
    )


def _yarn_magnitude(settings: Mapping[str, Any], factor: float) -> float:
    """The factor of cosines and sines that follows from that of the context."""
    weights = [
        read_number(settings, name, 0.0, ge=0.0, le=MAGNITUDES[1], place=IN_ROPE)
        for name in ("mscale", "mscale_all_dim")
    ]
    magnitudes = [_magnitude_of(weight, factor) for weight in (*weights, 1.0)]
    return magnitudes[0] / magnitudes[1] if all(weights) else magnitudes[2]


def _magnitude_of(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _magnitude(settings: Mapping[str, Any], name: str) -> float:
    return read_number(settings, name, 1.0, ge=MAGNITUDES[0], le=MAGNITUDES[1], place=IN_ROPE)


def _original_context(config: Mapping[str, Any], settings: Mapping[str, Any], *, ge: int) -> int:
    """Tokens of context in pretraining."""
    name = "original_max_position_embeddings"
    given = (config.get(name), settings.get(name), config.get("max_position_embeddings"))
    context = next((value for value in given if value is not None), None)
    return int(read_number({name: context}, name, ge=ge, le=MAX_CONTEXT, place=IN_ROPE))


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
