"""Checks for the fields of public Structs: msgspec's constructors check neither types nor ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable

from drift_sdk.errors import FieldError

__all__ = ["check_bool", "check_choice", "check_float", "check_int", "check_str", "check_str_tuple"]

ErrorType = type[FieldError]


def check_bool(error: ErrorType, field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise error.of(field, value, "True or False")


def check_int(
    error: ErrorType,
    field: str,
    value: object,
    *,
    ge: int | None = None,
    le: int | None = None,
    optional: bool = False,
) -> None:
    if value is None and optional:
        return

    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not _in_range(value, ge, le):
        raise error.of(field, value, f"an integer{_range(ge, le)}{' or None' if optional else ''}")


def check_float(
    error: ErrorType,
    field: str,
    value: object,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    optional: bool = False,
) -> None:
    if value is None and optional:
        return

    is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    is_above = isinstance(value, int | float) and (gt is None or value > gt)
    if not is_number or not is_above or not _in_range(value, ge, le):
        bounds = (
            f" over {gt}{_range(None, le).replace(' ', ' and ', 1)}" if gt is not None else _range(ge, le)
        )
        raise error.of(field, value, f"a finite number{bounds}{' or None' if optional else ''}")


def check_choice(error: ErrorType, field: str, value: object, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise error.of(field, value, "one of " + ", ".join(map(repr, choices)))


def check_str(error: ErrorType, field: str, value: object, *, optional: bool = False) -> None:
    if value is None and optional:
        return

    if not isinstance(value, str) or not value:
        raise error.of(field, value, f"a non-empty string{' or None' if optional else ''}")


def check_str_tuple(error: ErrorType, field: str, value: object, *, max_items: int, max_chars: int) -> None:
    allowed = f"at most {max_items} non-empty strings of at most {max_chars} characters, no lone surrogates"
    if not isinstance(value, tuple) or len(value) > max_items:
        raise error.of(field, value, allowed)

    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= max_chars or not _is_unicode(item):
            raise error.of(field, item, allowed)


def _is_unicode(text: str) -> bool:
    """Whether a string has a UTF-8 form: no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False

    return True


def _is_finite(value: object) -> bool:
    assert isinstance(value, int | float)
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer no float can hold
        return False


def _in_range(value: object, ge: float | None, le: float | None) -> bool:
    assert isinstance(value, int | float)
    return (ge is None or value >= ge) and (le is None or value <= le)


def _range(ge: float | None, le: float | None) -> str:
    if ge is not None and le is not None:
        return f" from {ge} to {le}"

    if ge is not None:
        return f" of at least {ge}"

    return f" of at most {le}" if le is not None else ""
