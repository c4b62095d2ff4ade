"""Checked values of a model's config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr

__all__ = [
    "MAX_CONTEXT",
    "MAX_SIZE",
    "MIN_CONTEXT",
    "Settings",
    "read_bool",
    "read_int",
    "read_multiplier",
    "read_number",
]

# Far beyond any model, but small enough that all tensors can be listed and sizes multiplied.
MAX_SIZE = 2**24
MAX_CONTEXT = 2**31 - 1
MIN_CONTEXT = 2  # one token of a prompt and one generated token
MULTIPLIERS = (1e-6, 1e6)


class Settings(Mapping[str, Any]):
    """The settings of a config.json.

    max_model_len: length of the longest sequence that will be computed, in tokens; None: the model's context.
    """

    def __init__(self, values: Mapping[str, Any], max_model_len: int | None = None) -> None:
        self._values = values
        self.max_model_len = max_model_len

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, changes: Mapping[str, Any]) -> Settings:
        """The settings with `changes`."""
        return Settings({**self._values, **changes}, self.max_model_len)


def read_int(
    config: Mapping[str, Any], name: str, default: int | None = None, *, ge: int = 1, le: int = MAX_SIZE
) -> int:
    """The integer `name`, `default` if it is missing or null. Raises ModelLoadError outside `ge` to `le`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not ge <= value <= le:
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected an integer from {ge} to {le}")

    return value


def read_bool(config: Mapping[str, Any], name: str) -> bool:
    """The boolean `name`, False if it is missing or null. Raises ModelLoadError for other values."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected true or false")

    return bool(value)


def read_number(
    config: Mapping[str, Any],
    name: str,
    default: float | None = None,
    *,
    ge: float,
    le: float,
    place: str = "",
) -> float:
    """The number `name`, `default` if it is missing or null. Raises ModelLoadError outside `ge` to `le`.

    place: the part of the config that has the setting, for messages.
    """
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not ge <= value <= le:
        found, expected = f"{name}={short_repr(value)}{place}", f"from {ge:g} to {le:g}"
        raise ModelLoadError(f"config: {found}: expected a number {expected}")

    return float(value)


def read_multiplier(config: Mapping[str, Any], name: str, default: float | None = 1.0) -> float:
    """The factor `name`, as `read_number` reads it."""
    return read_number(config, name, default, ge=MULTIPLIERS[0], le=MULTIPLIERS[1])
