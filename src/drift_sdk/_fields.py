"""Fields of Structs, as their annotations declare them: names, types, and the bounds in a `Meta`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from drift_sdk._validation import (
    PLAIN_TYPES,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_path,
    check_str,
    plain_value,
    unknown_name,
)
from drift_sdk.errors import FieldError

__all__ = ["check_field_names", "check_fields", "kinds_of", "make_struct", "replace_fields"]

ErrorType = type[FieldError]
Check = Callable[[ErrorType, str, object], None]
StructT = TypeVar("StructT", bound=Struct)
CHECKS: dict[object, Callable[..., None]] = {
    bool: check_bool,
    int: check_int,
    float: check_float,
    str: check_str,
}


def check_fields(error: ErrorType, struct: Struct) -> None:
    """Check the fields of a new Struct against their types and the bounds in a `Meta`, after `plain_value`.
    What no check follows from, such as a tuple or another Struct, the Struct checks itself."""
    for name, default, check in declared_checks(type(struct)):
        value = getattr(struct, name)
        if value is default:
            continue

        if type(value) not in PLAIN_TYPES and (plain := plain_value(value)) is not value:
            msgspec.structs.force_setattr(struct, name, plain)
            value = plain
        if check is not None:
            check(error, name, value)


@functools.cache
def declared_checks(struct: type[Struct]) -> list[tuple[str, object, Check | None]]:
    """Name, default and check of each field of a Struct. The defaults are checked here, once."""
    found = [(field.name, field.default, check_of(field.type)) for field in msgspec.structs.fields(struct)]
    for name, default, check in found:
        if check is not None and default is not msgspec.NODEFAULT:
            check(FieldError, name, default)
    return found


def check_of(hint: Any) -> Check | None:
    """The check of a field of a type; None for a type that no check follows from."""
    kinds = kinds_of(hint)
    others = [kind for kind in kinds if kind is not type(None)]
    optional: dict[str, Any] = {"optional": True} if len(others) < len(kinds) else {}
    if set(others) == {str, Path}:
        return functools.partial(check_path, **optional)

    if len(others) > 1:
        return None

    bounds: dict[str, Any] = {}
    (kind,) = others
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)
        bounds = dict(meta.__rich_repr__())  # the bounds that are set, by name
    if get_origin(kind) is Literal:
        return functools.partial(check_choice, choices=get_args(kind), **optional)

    check = CHECKS.get(kind)
    return functools.partial(check, **bounds, **optional) if check is not None else None


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types that a union consists of, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def check_field_names(
    error: ErrorType, struct: type[Struct], values: Mapping[Any, object], *, name: str = "settings"
) -> None:
    """Raise for `values` that are no mapping, under `name`, and for the first name in them that is not a
    field of the Struct: the message names the nearest field and all fields. Also for more values than fields:
    a mapping of the caller may have no end."""
    if not isinstance(values, Mapping):
        raise error.of(name, values, "a mapping")

    known = set(struct.__struct_fields__)
    for number, field in enumerate(values):
        if field not in known or number == len(known):
            raise unknown_name(error, field, values[field], known)


def make_struct(error: ErrorType, struct: type[StructT], values: Mapping[Any, Any]) -> StructT:
    """A Struct from plain data; `error` for what is no mapping, and for an unknown field."""
    check_field_names(error, struct, values)
    return struct(**values)


def replace_fields(error: ErrorType, struct: StructT, changes: Mapping[str, object]) -> StructT:
    """A copy of a Struct with some fields changed, checked like a new one; `error` for an unknown field."""
    check_field_names(error, type(struct), changes)
    return msgspec.structs.replace(struct, **changes)
