"""Rules for the functions of chat templates.

They state which methods templates may call, replace filters of Jinja that may do unbounded work, and tell by
which sizes the others are charged.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, KeysView, Sequence, ValuesView
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.filters
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Namespace

__all__ = [
    "COMPARING",
    "CONSTANT",
    "FILTERS",
    "METHODS",
    "PRODUCTS",
    "READING",
    "SEARCHES",
    "SHALLOW",
    "SLOW_FILTERS",
    "format_widths",
    "members_of",
    "num_parts",
    "widths",
]

MAX_PRECISION = 20  # decimal places that a number may be rounded to
MAX_INTEGER_CHARS = 4300  # Python does not convert longer decimal numbers

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal "
        "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
        "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split "
        "splitlines startswith strip swapcase title upper zfill".split()
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
}
"""The methods that templates may call, by the type of the object."""

SLOW_FILTERS = ("pprint", "striptags", "urlize", "wordcount", "wordwrap")
"""The filters of Jinja that templates may not use."""

# Filters whose time depends on the number of members, not on the text in them.
SHALLOW = frozenset(
    {
        *("attr", "batch", "items", "list", "map", "reject", "rejectattr", "reverse"),
        *("select", "selectattr"),
    }
)
# Tests that compare values, and so may read all of their text.
COMPARING = frozenset(
    {
        *("in", "eq", "equalto", "==", "ne", "!="),
        *("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
    }
)
# Filters that take constant time.
CONSTANT = frozenset({"count", "d", "default", "first", "last", "length"})

# Functions whose result may be as long as the product of the lengths of two arguments.
PRODUCTS = frozenset({"format", "indent"})
# Functions with a length as an integer argument.
WIDTHS = frozenset({"batch", "center", "indent", "ljust", "rjust", "slice", "tojson", "zfill"})
# Functions that compare each character of a text with each character of an argument.
SEARCHES = frozenset({"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"})
# Filters that read an iterator to its end.
READING = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique", "urlencode"})
# Filters that make a list of a text's characters.
CHARACTERS = READING | {"batch", "list", "slice"}
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

# Formats with a width of six digits or more, or with a width that is an argument.
WIDTH_IN_FORMAT = re.compile(r"\d{6}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
NUMBER = re.compile(r"\d+")


def members_of(value: object) -> Sequence[Any]:
    """The values that are written as part of a value's text; empty for a value without members."""
    if isinstance(value, list | tuple):
        return value

    if isinstance(value, dict | MappingProxyType):
        return [*value, *value.values()]

    if isinstance(value, KeysView | ValuesView | ItemsView):
        return list(value)

    return [value._Namespace__attrs] if isinstance(value, Namespace) else ()


def bounded_int(value: Any, default: Any = 0, base: int = 10) -> Any:
    """Jinja's `int`; the default for texts of more than `MAX_INTEGER_CHARS` characters."""
    is_long = isinstance(value, str) and len(value) > MAX_INTEGER_CHARS
    return default if is_long else jinja2.filters.do_int(value, default, base)


def bounded_round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    """Jinja's `round`, to at most `MAX_PRECISION` decimal places."""
    if not isinstance(precision, int) or not 0 <= precision <= MAX_PRECISION:
        raise jinja2.TemplateError(f"it rounds to a precision that is not from 0 to {MAX_PRECISION}")

    return jinja2.filters.do_round(value, precision, method)


@jinja2.pass_environment
def bounded_sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's `sum`, with a number as start only."""
    if not isinstance(start, int | float):
        raise jinja2.TemplateError("it adds to a sum that does not start with a number")

    return jinja2.filters.do_sum(environment, iterable, attribute, start)


def widths(name: str, values: Sequence[object]) -> list[int]:
    """The arguments that may be lengths of the result."""
    return [value for value in values[1:] if isinstance(value, int) and value > 0] if name in WIDTHS else []


def num_parts(name: str, values: Sequence[object]) -> int:
    """Number of members of the intermediate lists that a string method or filter makes of its arguments."""
    if name in ("batch", "slice"):
        return sum(widths(name, values)) + sum(len(value) for value in values[:1] if isinstance(value, str))

    if name == "join":
        # The characters of a text: the first argument of the filter, the second of the method.
        return sum(len(value) for value in values if isinstance(value, str))

    text = values[0] if values else None
    if not isinstance(text, str):
        return 0

    if name in ("split", "rsplit"):
        separator = values[1] if len(values) > 1 else None
        return 1 + (text.count(separator) if isinstance(separator, str) and separator else len(text) // 2)

    if name in ("splitlines", "indent"):
        return 1 + sum(map(text.count, LINE_ENDS))

    if name in ("title", "urlencode"):
        return len(text) // 4

    return len(text) if name in CHARACTERS else 0


def format_widths(text: object) -> int:
    """An upper bound on the characters that the widths and precisions of a format add."""
    if not isinstance(text, str):
        raise jinja2.TemplateError("it formats with a value that is not text")

    if WIDTH_IN_FORMAT.search(text) is not None:
        raise jinja2.TemplateError("it formats with a width that is too large or not a constant")

    return sum(map(int, NUMBER.findall(text)))


FILTERS = {"int": bounded_int, "round": bounded_round, "sum": bounded_sum}
"""The filters that replace those of Jinja."""
