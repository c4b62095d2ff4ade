"""Which JSON schemas exclude each other: no value has both. A `oneOf` of such schemas is an `anyOf`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, starmap
from typing import Any, NamedTuple

from drift_sdk.text.schema_references import followed

__all__ = ["are_exclusive"]

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
