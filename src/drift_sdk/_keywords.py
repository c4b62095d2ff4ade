"""Errors for unknown keyword arguments, which name the nearest known one.

Python and msgspec raise a bare TypeError. The errors here are a TypeError too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints

import msgspec

from drift_sdk._validation import unknown_name
from drift_sdk.errors import ConfigKeywordError, FieldError, RequestKeywordError

__all__ = ["ConfigFields", "RequestFields", "with_config"]

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

    error = ConfigKeywordError


class RequestFields(CheckedFields):
    """The metaclass of prompts and parameters of requests."""

    error = RequestKeywordError


def with_config(config: type[msgspec.Struct]) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator of functions that take a `config`: ConfigError for unknown keyword arguments. Its message
    says if one is a field of the config."""
    fields = config.__struct_fields__

    def decorate(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]

        @functools.wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> ResultT:
            for name, value in keywords.items():
                if name not in known:
                    here = f"{config.__name__}.{name}" if name in fields else None
                    raise unknown_name(ConfigKeywordError, name, value, known, kind="argument", here=here)

            return function(*arguments, **keywords)

        return checked

    return decorate
