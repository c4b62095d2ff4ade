"""Errors for unknown keyword arguments, which name the nearest known one.

Python and msgspec raise a bare TypeError. The errors here are a TypeError too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_type_hints

import msgspec

from drift_sdk._validation import unknown_name
from drift_sdk.errors import ConfigKeywordError, FieldError, RequestKeywordError

__all__ = ["ConfigFields", "RequestFields", "check_options", "with_config"]

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
