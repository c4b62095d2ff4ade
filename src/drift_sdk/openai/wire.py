"""JSON bodies of requests as typed values, and the rule for fields that are not supported.

A field of a body is one of these:

- supported: a field of the body's Struct, or one of `sampling.SAMPLING`;
- without effect on the answer, and ignored: in `ignored`;
- refused by an error that names it, unless it has a value that changes nothing: in `refused`;
- unknown, and refused too: it may be the wrong spelling of one that matters.

null means the default, since clients send null for unset fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from drift_sdk import RequestError

__all__ = ["Body", "Wire", "decode"]

MAX_NAME_CHARS = 100
MISSING = re.compile("Object missing required field `(.*)`")


class Wire(Struct):
    """An object inside a body. Its unknown fields are ignored: clients send back what other servers added."""


class Strict(Struct, forbid_unknown_fields=True):
    """An object whose fields all have an effect, so that an unknown one is refused."""


class Body(Struct, kw_only=True):
    """The body of a request.

    sampling: fields of `sampling.SAMPLING` that were given, by their names in the protocol.
    """

    max_items: ClassVar[int] = 100_000
    """Most items over all levels: as many as engines take in messages and tools."""
    sampling_names: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    sampling: dict[str, Any] = {}


BodyT = TypeVar("BodyT", bound=Body)


def decode(data: bytes, kind: type[BodyT]) -> BodyT:
    """The body that JSON text describes. RequestError for anything else, with the path of the wrong value."""
    try:
        values = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and the one of text that is no UTF-8
        raise RequestError(f"body: JSON decode error: {error}", field="body") from error

    if not isinstance(values, dict):
        raise RequestError.of("body", values, "a JSON object")

    check_size(values, kind.max_items)
    return read(values, kind)


def read(values: Mapping[str, Any], kind: type[BodyT]) -> BodyT:
    """The body that a decoded JSON object describes."""
    fields: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name in kind.ignored:
            continue

        if name in kind.sampling_names:
            sampling[name] = value
        elif name in kind.__struct_fields__ and name != "sampling":
            fields[name] = value
        elif name not in kind.refused:
            shown = repr(name[:MAX_NAME_CHARS])
            message = f"{shown}: unknown field, expected a field of the protocol"
            raise RequestError(message, field=name[:MAX_NAME_CHARS], value=value)
        elif not any(value == accepted and type(value) is type(accepted) for accepted in kind.refused[name]):
            allowed = " or ".join([*map(repr, kind.refused[name]), "null"])
            raise RequestError.of(name, value, f"{allowed}: this server supports nothing else")

    return convert({**fields, "sampling": sampling}, kind)


T = TypeVar("T")


def convert(value: object, kind: type[T], place: str = "") -> T:
    """A typed value. RequestError with the path of what is wrong; place: the path of the whole value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        missing = MISSING.fullmatch(what)
        inside = f".{missing[1]}" if missing is not None else ""
        field = f"{place}{path.removesuffix('`')}{inside}".removeprefix(".") or "body"
        raise RequestError(f"{field}: {what}", field=field) from error


def check_size(values: object, most: int) -> None:
    """RequestError for more than `most` items over all levels."""
    containers: list[Any] = [values]
    num_items = 0
    while containers:
        container = containers.pop()
        num_items += len(container)
        if num_items > most:
            raise RequestError(f"body: more than {most} items", field="body")

        inside = container.values() if isinstance(container, dict) else container
        containers += [each for each in inside if isinstance(each, dict | list)]
