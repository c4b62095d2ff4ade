"""JSON schemas rewritten to equivalent ones that llguidance enforces.

It rejects keywords that restrict nothing or can be expressed by others, and enforces some numeric bounds
wrongly. References are followed, and kept when a part becomes a schema by itself. A `oneOf` of schemas that
exclude each other (no value has both) is an `anyOf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, starmap
from math import ulp
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import quote, unquote

from drift_sdk.errors import short_repr

DEFINITIONS = ("$defs", "definitions")
"""Keywords under which a schema has parts for others to refer to."""

HOME = "parameters"
"""Name of a schema among the definitions of a part that has become a schema by itself."""

MAX_STEPS = 100
"""Most references that are followed from one to the next; circular ones have no end."""

DATA = ("const", "default", "enum", "examples")
NAMED = (*DEFINITIONS, "dependentSchemas", "patternProperties", "properties")
ANNOTATIONS = frozenset(
    (*DEFINITIONS, "$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title")
)
"""Keywords that restrict nothing."""


def is_local(reference: object) -> TypeGuard[str]:
    """Whether the value of a `$ref` is a JSON pointer into the schema that it stands in."""
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def resolve(schema: Any, reference: str) -> Any:
    """The value that a JSON pointer refers to; None if there is none."""
    value = schema
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and step.isdecimal() and len(step) < 9 and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, Mapping) and step in value:
            value = value[step]
        else:
            return None
    return value


def followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema joined with the one that it refers to, or that is the only member of its `allOf`, and so on
    with the result. It ends where both have a keyword with different values, apart from annotations.

    root: the schema that references refer into.
    """
    for _ in range(MAX_STEPS):
        reference, members = schema.get("$ref"), schema.get("allOf")
        if is_local(reference):
            keyword, inner = "$ref", resolve(root, reference)
        elif isinstance(members, list) and len(members) == 1:
            keyword, inner = "allOf", members[0]
        else:
            break

        own = {name: value for name, value in schema.items() if name != keyword}
        if not isinstance(inner, Mapping):
            break

        if any(own[name] != inner[name] for name in (own.keys() & inner.keys()) - ANNOTATIONS):
            break

        schema = {**inner, **own}
    return schema


def part_of(root: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """A part of a schema as a schema by itself. Its references refer to what they refer to in the whole.

    path: the keywords and names that lead to the part; none = all of it, to be put into another schema.
          Its definitions, under `DEFINITIONS`, must then be those of that schema.
    """
    part: Any = {name: value for name, value in root.items() if name != "$id"}
    definitions = {name: part[name] for name in DEFINITIONS if name in part}
    for step in path:
        part = part[step]
    if not isinstance(part, Mapping):
        return definitions

    references = [each.get("$ref") for each in schemas_in({**definitions, "allOf": [part]})]
    if all(is_kept(reference) for reference in references):
        return {**part, **definitions}

    home = json.loads(json.dumps({name: value for name, value in root.items() if name != "$id"}))
    for each in schemas_in(home):
        if is_local(reference := each.get("$ref")):
            each["$ref"] = f"#/$defs/{HOME}{reference[1:]}"
    steps = [quote(step.replace("~", "~0").replace("/", "~1"), safe="") for step in path]
    return {"$ref": "/".join([f"#/$defs/{HOME}", *steps]), "$defs": {HOME: home}}


def is_kept(reference: object) -> bool:
    """Whether a reference means the same in every schema that has the same definitions."""
    is_inside = isinstance(reference, str) and reference.startswith("#")
    return not is_inside or str(reference).startswith(tuple(f"#/{name}/" for name in DEFINITIONS))


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas inside of it. Values that it names, such as those of `enum`, are none."""
    waiting = [(schema, False)]  # values, and whether they have schemas by name
    while waiting:
        value, is_named = waiting.pop()
        if isinstance(value, list):
            waiting += [(inner, False) for inner in value]
        elif isinstance(value, dict):
            if not is_named:
                yield value
            waiting += [
                (inner, not is_named and name in NAMED)
                for name, inner in value.items()
                if is_named or name not in DATA
            ]


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
MAX_DEPTH = 8
"""Levels of properties and alternatives that are compared; schemas may refer to themselves."""
MAX_COMPARISONS = 10_000


def are_exclusive(choices: Iterable[object], root: Any) -> bool:
    """Whether in each of these lists of schemas, each two are found to exclude each other: by types, by
    constants and enumerations, or by a property that one of them requires. Patterns and bounds are not
    compared.

    root: the schema that references refer into.
    """
    comparison = Comparison(root if isinstance(root, Mapping) else {})
    return all(
        isinstance(schemas, list) and all(starmap(comparison.is_exclusive, combinations(schemas, 2)))
        for schemas in choices
    )


class Facts(NamedTuple):
    """What is compared of a schema.

    schema: joined with what it refers to.
    types:  those that it permits. Integers are numbers.
    values: those that it enumerates, with their types; None if it does not. Arrays and objects are not told
            apart.
    """

    schema: Mapping[str, Any]
    types: frozenset[str]
    values: frozenset[tuple[str, object]] | None


class Comparison:
    """Comparisons of schemas, `MAX_COMPARISONS` at most, after which none are found to be exclusive."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_COMPARISONS
        self._facts: dict[int, Facts] = {}  # by id() of schemas, which are parts of the root

    def is_exclusive(self, left: object, right: object, depth: int = MAX_DEPTH) -> bool:
        """Whether no value has both schemas; also False if that is not found out."""
        self._num_left -= 1
        if self._num_left < 0 or depth == 0:
            return False

        if left is False or right is False:
            return True

        if not isinstance(left, Mapping) or not isinstance(right, Mapping):
            return False

        first, second = self._facts_of(left), self._facts_of(right)
        if not first.types & second.types:
            return True

        if first.values is not None and second.values is not None and not first.values & second.values:
            return True

        return (
            self._alternatives_differ(first.schema, right, depth)
            or self._alternatives_differ(second.schema, left, depth)
            or (first.types & second.types == {"object"} and self._properties_differ(first, second, depth))
        )

    def _facts_of(self, schema: Mapping[str, Any]) -> Facts:
        facts = self._facts.get(id(schema))
        if facts is None:
            whole = followed(schema, self._root)
            stated, values = whole.get("type"), values_of(whole)
            names = [stated] if isinstance(stated, str) else strings_of(stated)
            types = frozenset("number" if name == "integer" else name for name in names) if names else TYPES
            if values is not None:
                types &= {kind for kind, _ in values}
            facts = self._facts[id(schema)] = Facts(whole, types, values)
        return facts

    def _alternatives_differ(self, schema: Mapping[str, Any], other: object, depth: int) -> bool:
        """Whether a schema and another exclude each other by the schemas that the first is made of."""
        for keyword, every in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            members = schema.get(keyword)
            if isinstance(members, list) and members:
                if every(self.is_exclusive(member, other, depth - 1) for member in members):
                    return True

        return False

    def _properties_differ(self, left: Facts, right: Facts, depth: int) -> bool:
        """Whether schemas that permit only objects in common exclude each other by a property that one of
        them requires."""
        required = strings_of(left.schema.get("required")) + strings_of(right.schema.get("required"))
        return any(
            self.is_exclusive(property_of(left.schema, name), property_of(right.schema, name), depth - 1)
            for name in dict.fromkeys(required)
        )


def values_of(schema: Mapping[str, Any]) -> frozenset[tuple[str, object]] | None:
    """The values that a schema enumerates, as `Facts` has them."""
    if "const" in schema:
        return frozenset([typed(schema["const"])])

    values = schema.get("enum")
    return frozenset(map(typed, values)) if isinstance(values, list) else None


def typed(value: object) -> tuple[str, object]:
    """A JSON value with its type, so that true differs from 1."""
    if value is None:
        return "null", None

    if isinstance(value, bool):
        return "boolean", value

    if isinstance(value, int | float):
        return "number", value

    if isinstance(value, str):
        return "string", value

    return "array" if isinstance(value, list) else "object", None


def property_of(schema: Mapping[str, Any], name: str) -> object:
    """The schema of a property, or a wider one."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]

    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def strings_of(value: object) -> list[str]:
    """The strings of a list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


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
