"""Bounded deep copies of a caller's data as plain dicts, lists and scalars; an immutable mapping."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import islice
from typing import Any, Protocol, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from drift_sdk._fields import PLAIN_TYPES, is_integer_dtype
from drift_sdk.errors import RequestError, error_repr

K = TypeVar("K")
V = TypeVar("V", covariant=True)


class FrozenMapping(Mapping[K, V]):
    """An immutable mapping, sorted by its keys. It has a hash, so that a frozen Struct that holds one has one
    too."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V]) -> None:
        self._items = {key: items[key] for key in sorted(items)}  # type: ignore[type-var]  # keys can be sorted

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


MAX_DEPTH = 500
"""Most levels of nested data. Recursive functions fail on more, at a depth that depends on the version of
Python."""
MAX_ITEMS = 100_000
"""Most items of nested data, over all its levels. Reading so many holds up the caller's event loop for some
tens of milliseconds. A megabyte of JSON has fewer, unless it is made of short numbers alone."""
MAX_INTEGER_BITS = 14_000
"""Python writes no integer of more than 4,300 digits, which is a little more."""
MAX_JSON_CHARS = 2**19
"""Most characters of data that is written as JSON, or read from it, on the caller's event loop."""
BINARY_TYPES = (bytes, bytearray, memoryview)
"""Types of data that is no text. msgspec would write it as text, in base64."""
OTHER_SCALARS = (datetime, date, time, timedelta, UUID, Decimal)
"""Types that msgspec would write as text, and json.dumps rejects."""
TEXT_TYPES = (str, *BINARY_TYPES)

ValueT = TypeVar("ValueT")


def to_plain(field: str, value: object, *, is_json: bool = False) -> Any:
    """A deep copy of `value` that shares nothing mutable with it. RequestError naming `field` if it is not
    plain data, has more than MAX_ITEMS items or MAX_DEPTH levels, or with `is_json` has integers that cannot
    be written as JSON."""
    try:
        check_nested(value, max_bits=MAX_INTEGER_BITS if is_json else None)
        return msgspec.to_builtins(value, enc_hook=to_builtin, builtin_types=BINARY_TYPES)
    except Exception as error:  # a class of the caller may run any code
        allowed = f"plain data: mappings, sequences and scalars ({error})"
        raise RequestError.of(field, value, allowed) from error


def to_json(field: str, value: object) -> str:
    """`value` as JSON text. RequestError naming `field` for what `to_plain` rejects, for what JSON does not
    have, and for more than MAX_JSON_CHARS characters in strings and integers together."""
    try:
        check_nested(value, max_bits=MAX_INTEGER_BITS, is_text=True)
        plain = msgspec.to_builtins(value, enc_hook=to_builtin, builtin_types=BINARY_TYPES + OTHER_SCALARS)
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)
    except Exception as error:
        raise RequestError.of(field, value, f"plain JSON values ({error})") from error


@contextmanager
def reading(field: str, value: object, allowed: str) -> Iterator[None]:
    """Raise RequestError for errors of reading `value`: a class of the caller may run any code."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError.of(field, value, f"{allowed} ({error_repr(error)})") from error


def first_items(items: Iterable[Any], most: int) -> list[Any]:
    """The items of a sequence; ValueError if there are more than `most`. What a class of the caller says
    about its length may be wrong, and it may have no end."""
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(items, kind):  # a subclass may iterate in its own way
            items = kind.__iter__(items)
    found = list(islice(items, most + 1))
    if len(found) > most:
        raise ValueError(f"more than {most} items")

    return found


def plain_tuple(field: str, value: ValueT, most: int, allowed: str) -> ValueT | tuple[Any, ...]:
    """A list or a tuple, whatever its class does, as a plain tuple; other values as they are. RequestError
    for more than `most` items."""
    if not isinstance(value, list | tuple) or (type(value) is tuple and len(value) <= most):
        return value

    try:
        return tuple(first_items(value, most))
    except ValueError as error:
        raise RequestError.of(field, value, allowed) from error


def first_pairs(mapping: Mapping[Any, Any], most: int) -> dict[Any, Any]:
    """The items of a mapping as a dict; ValueError if there are more than `most`."""
    if isinstance(mapping, dict):
        if dict.__len__(mapping) > most:
            raise ValueError(f"more than {most} items")

        return dict(dict.items(mapping))  # a subclass may iterate in its own way, which dict.copy would do

    return {key: mapping[key] for key in first_items(mapping, most)}


class IdArray(Protocol):
    """A one-dimensional array of integers of numpy, torch or a library like them."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tolist(self) -> Any: ...


def ids_of_array(field: str, value: ValueT, most: int) -> ValueT | tuple[int, ...]:
    """The token ids in an array of numpy, torch or a library like them; other values as they are.
    RequestError for an array of other numbers or dimensions, without data, or of more than `most` items."""
    allowed = "a one-dimensional array of integers"
    with reading(field, value, allowed):
        dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
        if dtype is None or not isinstance(shape, tuple):
            return value

        if len(shape) != 1 or not is_integer_dtype(dtype):
            raise RequestError.of(field, value, f"{allowed}, not {dtype} of the shape {tuple(shape)}")

        if shape[0] > most:
            raise RequestError.of(field, value, f"at most {most} items, not {shape[0]}")

        array: Any = value
        return tuple(array.tolist())


def check_nested(value: object, *, max_bits: int | None, is_text: bool = False) -> None:
    """Raise ValueError or TypeError for more than MAX_ITEMS items or MAX_DEPTH levels, for bytes, and for an
    integer of more than `max_bits` bits (None = no limit).

    is_text: the data is to become JSON text: raise also for sets, and for more than MAX_JSON_CHARS characters
             in strings and integers together.
    """
    level: list[Any] = [value]
    num_levels = num_items = num_chars = 0
    while level:
        inner: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is str:
                num_chars += len(each)
            elif kind is int:
                num_bits = each.bit_length()
                num_chars += num_bits // 3
                if max_bits is not None and num_bits > max_bits:
                    raise ValueError(f"an integer of {num_bits} bits: expected at most {max_bits}")
            elif kind not in PLAIN_TYPES:
                inside = each if kind is list or kind is dict else inside_of(each)
                if inside is None:
                    if isinstance(each, BINARY_TYPES):
                        raise no_plain_data(each)

                    if isinstance(each, int):  # of a class of the caller
                        inner.append(int.__index__(each))
                    continue

                if is_text and isinstance(each, set | frozenset):
                    raise no_plain_data(each)

                num_items += len(inside)
                if num_items > MAX_ITEMS:
                    raise ValueError(f"more than {MAX_ITEMS} items")

                if num_levels == MAX_DEPTH:
                    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")

                inner += inside
                if isinstance(inside, dict):
                    inner += inside.values()
        level = inner
        num_levels += 1
    if is_text and num_chars > MAX_JSON_CHARS:
        raise ValueError(f"more than {MAX_JSON_CHARS} characters")


def inside_of(value: object) -> list[Any] | dict[Any, Any] | None:
    """The items of a container, at most MAX_ITEMS; None for a scalar."""
    if isinstance(value, dict | Mapping):
        return first_pairs(value, MAX_ITEMS)

    if isinstance(value, list | set | frozenset | Sequence) and not isinstance(value, TEXT_TYPES):
        return first_items(value, MAX_ITEMS)

    if isinstance(value, Enum):
        return [value.value]

    # What msgspec takes besides: its own Structs, dataclasses, and classes of attrs.
    kind = type(value)
    names = (
        value.__struct_fields__ if isinstance(value, Struct) else getattr(kind, "__dataclass_fields__", ())
    )
    names = names or [attribute.name for attribute in getattr(kind, "__attrs_attrs__", ())]
    return [getattr(value, name, None) for name in names] if names else None


def to_builtin(value: object) -> dict[Any, Any] | list[Any] | str:
    """The dict, list or str that stands for a value of a type that msgspec does not know."""
    if isinstance(value, Mapping):
        return first_pairs(value, MAX_ITEMS)

    if isinstance(value, str):
        return str.__str__(value)

    if isinstance(value, Sequence) and not isinstance(value, BINARY_TYPES):
        return first_items(value, MAX_ITEMS)

    raise no_plain_data(value)


def no_plain_data(value: object) -> TypeError:
    return TypeError(f"found {type(value).__name__}")
