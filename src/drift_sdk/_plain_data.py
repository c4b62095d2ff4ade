"""Deep copies of a caller's data as plain dicts, lists and scalars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from drift_sdk.errors import RequestError

__all__ = ["MAX_DEPTH", "MAX_ITEMS", "check_depth", "to_plain"]

MAX_DEPTH = 500
"""Most levels of nested data. Recursive functions fail on more, at a depth that depends on the version of
Python."""
MAX_INTEGER_BITS = 14_000
"""Python writes no integer of more than 4,300 digits as JSON, which is a little more."""
MAX_ITEMS = 2**20
"""Most items of a sequence that is no list or tuple: it may compute them, as a range does, without end."""
BINARY_TYPES = (bytes, bytearray, memoryview)
"""Types of data that is no text. msgspec would write it as text, in base64."""


def to_plain(field: str, value: object, *, is_json: bool = False) -> Any:
    """A deep copy of `value` that shares nothing mutable with it; RequestError naming `field` if it is not
    plain data, or with `is_json` has integers that cannot be written as JSON."""
    try:
        plain = msgspec.to_builtins(value, enc_hook=to_builtin, builtin_types=BINARY_TYPES)
        check_depth(plain)
        check_types(plain)
        if is_json:
            check_integers(plain)
        return plain
    except Exception as error:
        allowed = f"plain data: mappings, sequences and scalars ({error})"
        raise RequestError.of(field, value, allowed) from error


def check_depth(value: object) -> None:
    """Raise ValueError for dicts, lists and tuples that are nested deeper than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list | tuple)]
        if not containers:
            return

        insides = (each.values() if isinstance(each, dict) else each for each in containers)
        level = [inner for inside in insides for inner in inside]
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def scalars_of(value: object) -> Iterator[object]:
    """The keys and values of nested data that are no containers."""
    found = [value]
    while found:
        each = found.pop()
        if isinstance(each, dict):
            found += each
            found += each.values()
        elif isinstance(each, list | tuple):
            found += each
        else:
            yield each


def check_types(value: object) -> None:
    """Raise TypeError for data with bytes."""
    for each in scalars_of(value):
        if isinstance(each, BINARY_TYPES):
            raise no_plain_data(each)


def check_integers(value: object) -> None:
    """Raise ValueError for data with an integer of more than MAX_INTEGER_BITS bits."""
    for each in scalars_of(value):
        if isinstance(each, int) and each.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"an integer of {each.bit_length()} bits: expected at most {MAX_INTEGER_BITS}")


def to_builtin(value: object) -> dict[Any, Any] | list[Any] | str:
    """The dict, list or str that stands for a value of a type that msgspec does not know."""
    if isinstance(value, Mapping):
        return dict(value)

    if isinstance(value, str):
        return str.__str__(value)

    if isinstance(value, Sequence) and not isinstance(value, BINARY_TYPES):
        if len(value) > MAX_ITEMS:
            raise TypeError(
                f"found {type(value).__name__} of {len(value)} items: expected at most {MAX_ITEMS}"
            )

        items = list(islice(value, MAX_ITEMS + 1))  # it may be longer than it says
        if len(items) > MAX_ITEMS:
            raise TypeError(f"found {type(value).__name__} of more than {MAX_ITEMS} items")

        return items

    raise no_plain_data(value)


def no_plain_data(value: object) -> TypeError:
    return TypeError(f"found {type(value).__name__}")
