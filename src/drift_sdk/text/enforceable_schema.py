"""JSON schemas rewritten to equivalent ones that llguidance enforces.

It rejects keywords that restrict nothing or can be expressed by others, and enforces some numeric bounds
wrongly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import ulp
from typing import Any

from drift_sdk.errors import short_repr
from drift_sdk.text.exclusive_schemas import are_exclusive
from drift_sdk.text.schema_references import ANNOTATIONS, followed, is_number, schemas_in

__all__ = ["enforceable"]

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Values of `format` that llguidance enforces. All others are annotations."""

PATTERNS = {"decimal": r"^-?[0-9]+(\.[0-9]+)?$"}
"""Patterns in place of formats that llguidance does not know. msgspec writes `decimal`."""

LENGTHS = ("minLength", "maxLength")
COUNTS = (*LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")

SMALLEST_NUMBER = 1e-18
"""The number that follows 0. llguidance takes a fraction of more than 18 digits for zero."""
NUM_DIGITS = 15
"""Digits of which every number is exact in llguidance."""


def enforceable(schema: Any) -> Any:
    """A schema that permits the same values, apart from numbers that are nearer to an exclusive bound than
    `number_after` is. It must have been checked by `check_schema`.

    Raises ValueError for `propertyNames` that cannot be expressed.
    """
    rewritten = json.loads(json.dumps(schema))
    for each in schemas_in(rewritten):
        include_bounds(each)
        simplify(each)
        if "propertyNames" in each:
            name_properties(each, schema)

    choices = [each["oneOf"] for each in schemas_in(schema) if "oneOf" in each]
    options = rewritten.get("x-guidance", {}) if isinstance(rewritten, dict) else None
    if choices and isinstance(options, dict) and are_exclusive(choices, schema):
        rewritten["x-guidance"] = {**options, "coerce_one_of": True}
    return rewritten


def include_bounds(schema: dict[str, Any]) -> None:
    """Replace exclusive bounds of 0 and of whole numbers towards 0 by inclusive ones.

    llguidance permits such a bound itself if the other bound has the same whole part, as in (0, 0.5].
    """
    for exclusive, inclusive, sign in (
        ("exclusiveMinimum", "minimum", 1),
        ("exclusiveMaximum", "maximum", -1),
    ):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        if bound is True:  # in draft 4, the inclusive bound is then exclusive
            bound = other
        if not is_number(bound) or bound * sign < 0 or bound % 1:
            continue

        del schema[exclusive]
        nearest = number_after(int(abs(bound)))
        if is_number(other):
            nearest = max(nearest, sign * other)
        schema[inclusive] = sign * nearest


def number_after(whole: int) -> float:
    """The least number after a whole one from 0 that llguidance tells from it, with at most `NUM_DIGITS`
    significant digits."""
    if not whole:
        return SMALLEST_NUMBER

    num_decimals = NUM_DIGITS - len(str(whole))
    return float(f"{whole}.{1:0{num_decimals}d}") if num_decimals > 0 else whole + max(1.0, ulp(whole))


def simplify(schema: dict[str, Any]) -> None:
    """Leave out what restricts nothing, and write whole counts as integers."""
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS:
        del schema["format"]
        if name in PATTERNS:
            schema.setdefault("pattern", PATTERNS[name])

    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]

    for keyword in COUNTS:
        count = schema.get(keyword)
        if isinstance(count, float) and count.is_integer():
            schema[keyword] = int(count)


def name_properties(schema: dict[str, Any], root: Any) -> None:
    """Replace `propertyNames` by `patternProperties`, which prescribe no order.

    root: the schema that references refer into.
    """
    given = schema.pop("propertyNames")
    allowed = names_of(followed(given, root) if isinstance(given, Mapping) else given)
    if allowed is None:
        return

    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    if isinstance(allowed, list):
        for name in properties.keys() - set(allowed):
            properties[name] = False
        others = [name for name in allowed if name not in properties]
        patterns = [f"^({'|'.join(map(re.escape, others))})$"] if others else []
    else:
        patterns = [allowed]

    if "patternProperties" in schema or (properties and isinstance(allowed, str)):
        where = "no patternProperties beside it, and properties only if it has const or enum"
        raise ValueError(f"propertyNames={short_repr(given)}: expected {where}")

    schema["patternProperties"] = dict.fromkeys(patterns, schema.get("additionalProperties", True))
    schema["additionalProperties"] = False


def names_of(schema: object) -> list[str] | str | None:
    """The names that a value of `propertyNames` allows: a list, a regular expression, or None for all.
    Formats are annotations here. Raises ValueError for other keywords."""
    if not isinstance(schema, Mapping):
        return [] if schema is False else None

    types = schema.get("type", "string")
    if "string" not in (types if isinstance(types, list) else [types]):
        return []

    keywords = schema.keys() - ANNOTATIONS - {"format", "type"}
    if not keywords:
        return None

    if keywords in ({"const"}, {"enum"}) and isinstance(
        values := schema.get("enum", [schema.get("const")]), list
    ):
        return [value for value in values if isinstance(value, str)]

    if keywords == {"pattern"} and isinstance(pattern := schema["pattern"], str):
        return pattern

    if keywords <= set(LENGTHS) and all(
        is_number(schema[name]) and schema[name] % 1 == 0 for name in keywords
    ):
        least, most = (str(int(schema[name])) if name in keywords else "" for name in LENGTHS)
        return f"^(?s:.{{{least or 0},{most}}})$"

    allowed = "one of const, enum, pattern, or minLength and maxLength"
    raise ValueError(f"propertyNames={short_repr(schema)}: expected {allowed}")
