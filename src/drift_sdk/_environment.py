"""Fields of a Struct from environment variables, whose strings are read by the types of the fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from drift_sdk._fields import kinds_of
from drift_sdk._other_names import OTHER_NAMES
from drift_sdk._validation import nearest_name
from drift_sdk.errors import FieldError, short_repr

__all__ = ["read_environment"]

FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_environment(
    error: type[FieldError], struct: type[Struct], prefix: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a Struct's fields, of those that have a variable: `prefix` and the field's name in upper
    case. A variable that is empty counts as not set, and "none" is None where the field takes None.

    A number, a flag (true or false, 1 or 0) or a JSON object is read as such where the field takes one and no
    string. Raises `error`, naming the variable, for a value of another type, and for a variable with the
    prefix that belongs to no field.
    """
    hints = get_type_hints(struct)
    fields = {f"{prefix}{field.upper()}": field for field in struct.__struct_fields__}
    values: dict[str, Any] = {}
    for variable in sorted(environment):
        text = environment[variable]
        if variable in fields and text:
            values[fields[variable]] = _read(error, variable, text, hints[fields[variable]])
        elif variable.startswith(prefix) and variable not in fields:
            here = OTHER_NAMES.get(variable.removeprefix(prefix).lower())
            hint = nearest_name(variable, fields) if here is None else f" (here: {here})"
            allowed = ", ".join(sorted(fields))
            message = f"{variable}={short_repr(text)}: unknown variable{hint}, expected one of {allowed}"
            raise error(message, field=variable, value=text, allowed=allowed)

    return values


def _read(error: type[FieldError], variable: str, text: str, hint: Any) -> Any:
    """A variable's value as one of the types that the field takes."""
    kinds = kinds_of(hint)
    if type(None) in kinds and text.lower() == "none":
        return None

    if any(kind is str or get_origin(kind) is Literal for kind in kinds):
        return text

    if bool in kinds:
        return _flag(error, variable, text)

    if int in kinds:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise error.of(variable, text, "an integer")

        return int(text)

    if float in kinds:
        try:
            return float(text)
        except ValueError:
            raise error.of(variable, text, "a number") from None

    return _object(error, variable, text)


def _flag(error: type[FieldError], variable: str, text: str) -> bool:
    if text.lower() not in FLAGS:
        raise error.of(variable, text, "true, false, 1 or 0")

    return FLAGS[text.lower()]


def _object(error: type[FieldError], variable: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as cause:
        raise error.of(variable, text, f"a JSON object ({cause})") from cause
