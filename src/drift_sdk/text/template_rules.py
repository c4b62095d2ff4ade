"""What a chat template may call: methods by type, and filters in place of Jinja's whose work has no bound."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Sequence, ValuesView
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.filters
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Namespace

__all__ = ["FILTERS", "METHODS", "SLOW_FILTERS", "members_of"]

MAX_PRECISION = 20  # decimals to round to
MAX_INTEGER_CHARS = 4300  # Python reads no longer decimal numbers

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
"""By the type of the object, the methods that templates may call."""

SLOW_FILTERS = ("pprint", "striptags", "urlize", "wordcount", "wordwrap")


def members_of(value: object) -> Sequence[Any]:
    """What is written inside the value's text."""
    if isinstance(value, list | tuple):
        return value

    if isinstance(value, dict | MappingProxyType):
        return [*value, *value.values()]

    if isinstance(value, KeysView | ValuesView | ItemsView):
        return list(value)

    return [value._Namespace__attrs] if isinstance(value, Namespace) else ()


def bounded_int(value: Any, default: Any = 0, base: int = 10) -> Any:
    is_long = isinstance(value, str) and len(value) > MAX_INTEGER_CHARS
    return default if is_long else jinja2.filters.do_int(value, default, base)


def bounded_round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(precision, int) or not 0 <= precision <= MAX_PRECISION:
        raise jinja2.TemplateError(f"it rounds to a precision that is not from 0 to {MAX_PRECISION}")

    return jinja2.filters.do_round(value, precision, method)


@jinja2.pass_environment
def bounded_sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise jinja2.TemplateError("it adds to a sum that does not start with a number")

    return jinja2.filters.do_sum(environment, iterable, attribute, start)


FILTERS = {"int": bounded_int, "round": bounded_round, "sum": bounded_sum}
