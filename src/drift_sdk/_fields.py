"""Fields of Structs as their annotations declare them, from keyword arguments and environment variables.

Python and msgspec raise a bare TypeError for an unknown keyword argument. The errors here are a TypeError
too, and name the nearest known one.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Struct

from drift_sdk._validation import (
    OTHER_NAMES,
    PLAIN_TYPES,
    ErrorType,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_path,
    check_str,
    nearest_name,
    plain_value,
    unknown_name,
)
from drift_sdk.errors import ConfigKeywordError, FieldError, RequestKeywordError, short_repr

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


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class CheckedFields(msgspec.StructMeta):
    """A metaclass of Structs whose constructors check the names of their arguments."""

    error: type[FieldError]

    if not TYPE_CHECKING:  # type checkers read the parameters of a constructor from the fields

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            known = cls.__struct_fields__
            for name, value in fields.items():
                if name not in known:
                    raise unknown_name(type(cls).error, name, value, known)

            return super().__call__(*values, **fields)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The signature with plain types: for people, docstrings state the bounds."""
            signature, kinds = super().__signature__, get_type_hints(cls)
            shown = [each.replace(annotation=kinds[each.name]) for each in signature.parameters.values()]
            return signature.replace(parameters=shown)


class ConfigFields(CheckedFields):
    """The metaclass of settings."""

    error: type[FieldError] = ConfigKeywordError


class RequestFields(CheckedFields):
    """The metaclass of prompts and parameters of requests."""

    error: type[FieldError] = RequestKeywordError


def with_config(
    config: type[msgspec.Struct], error: type[FieldError] = ConfigKeywordError
) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator of functions and coroutine functions: `error` for unknown keyword arguments. Its message
    says if one is a field of the config."""

    def decorate(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        known = parameters_of(function)

        @functools.wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> ResultT:
            check_keywords(error, keywords, known, config)
            return function(*arguments, **keywords)

        @functools.wraps(function)
        async def awaited(*arguments: P.args, **keywords: P.kwargs) -> Any:
            check_keywords(error, keywords, known, config)
            return await cast("Callable[P, Awaitable[object]]", function)(*arguments, **keywords)

        is_awaited = inspect.iscoroutinefunction(function)
        return cast("Callable[P, ResultT]", awaited) if is_awaited else checked

    return decorate


def check_options(
    options: Mapping[str, object],
    function: Callable[..., object],
    struct: type[msgspec.Struct],
    config: type[msgspec.Struct],
) -> None:
    """RequestKeywordError for one of the `**options` of a function that is no field of the struct. Its
    message says if it is a field of the config."""
    fields = struct.__struct_fields__
    if not all(name in fields for name in options):
        check_keywords(RequestKeywordError, options, [*parameters_of(function), *fields], config)


def check_keywords(
    error: type[FieldError], keywords: Mapping[str, object], known: list[str], config: type[msgspec.Struct]
) -> None:
    for name, value in keywords.items():
        if name not in known:
            here = f"{config.__name__}.{name}" if name in config.__struct_fields__ else None
            raise unknown_name(error, name, value, known, kind="argument", here=here)


def parameters_of(function: Callable[..., object]) -> list[str]:
    """The names of a function's keyword arguments."""
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    return [name for name in named if name not in ("self", "cls")]


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
