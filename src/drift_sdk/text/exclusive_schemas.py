"""Which JSON schemas exclude each other: no value has both. A `oneOf` of such schemas is an `anyOf`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from drift_sdk.text.schema_references import followed

__all__ = ["are_exclusive"]

TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
MAX_DEPTH = 8
"""Levels of properties and alternatives that are compared; schemas may refer to themselves."""
MAX_COMPARISONS = 10_000


def are_exclusive(schemas: object, root: Any) -> bool:
    """Whether each two of these schemas are found to exclude each other: by types, by constants and
    enumerations, or by a property that one of them requires. Patterns and bounds are not compared.

    root: the schema that references refer into.
    """
    if not isinstance(schemas, list) or not isinstance(root, Mapping):
        return False

    comparison = Comparison(root)
    return all(comparison.is_exclusive(left, right) for left, right in combinations(schemas, 2))


class Comparison:
    """Comparisons of schemas, `MAX_COMPARISONS` at most, after which none are found to be exclusive."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_COMPARISONS

    def is_exclusive(self, left: object, right: object, depth: int = MAX_DEPTH) -> bool:
        """Whether no value has both schemas; also False if that is not found out."""
        self._num_left -= 1
        if self._num_left < 0 or depth == 0:
            return False

        if left is False or right is False:
            return True

        if not isinstance(left, Mapping) or not isinstance(right, Mapping):
            return False

        left, right = followed(left, self._root), followed(right, self._root)
        for schema, other in ((left, right), (right, left)):
            for keyword, every in (("anyOf", all), ("oneOf", all), ("allOf", any)):
                members = schema.get(keyword)
                if isinstance(members, list) and members:
                    if every(self.is_exclusive(member, other, depth - 1) for member in members):
                        return True

        return values_differ(left, right) or self._properties_differ(left, right, depth)

    def _properties_differ(self, left: Mapping[str, Any], right: Mapping[str, Any], depth: int) -> bool:
        """Whether the schemas, which describe nothing in common but objects, exclude each other by a property
        that one of them requires."""
        if types_of(left) & types_of(right) != {"object"}:
            return False

        required = {name: None for schema in (left, right) for name in strings_of(schema.get("required"))}
        return any(
            self.is_exclusive(property_of(left, name), property_of(right, name), depth - 1)
            for name in required
        )


def values_differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two schemas have no type, or no enumerated value, in common."""
    if not types_of(left) & types_of(right):
        return True

    left_values, right_values = values_of(left), values_of(right)
    return left_values is not None and right_values is not None and not left_values & right_values


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema permits. Integers are numbers."""
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else strings_of(stated)
    types = frozenset("number" if name == "integer" else name for name in names) if names else TYPES
    values = values_of(schema)
    return types if values is None else types & {kind for kind, _ in values}


def values_of(schema: Mapping[str, Any]) -> frozenset[tuple[str, object]] | None:
    """The values that a schema enumerates, with their types; None if it does not. Arrays and objects are not
    told apart."""
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
