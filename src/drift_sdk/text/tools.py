"""Tools as chat templates take them, the types of their arguments, and values that models write as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from drift_sdk.text.answers.values import decode_json, decode_literal
from drift_sdk.text.schemas import followed, is_local, resolve


class Tool(Struct, frozen=True):
    """A tool.

    name:       as the model writes it in calls.
    parameters: JSON schema of its arguments, an object, joined with what it refers to; empty if the
                description has none.
    """

    name: str
    parameters: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of its arguments by name."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Names of arguments that every call has."""
        required = self.parameters.get("required")
        names = required if isinstance(required, Sequence) and not isinstance(required, str) else ()
        return frozenset(name for name in names if isinstance(name, str) and name in self.properties)


class ToolSet(dict[str, Tool]):
    """Tools by name. Of tools with the same name, the last counts."""

    @classmethod
    def of(cls, descriptions: object) -> ToolSet:
        """The tools of a list of descriptions, {"type": "function", "function": {...}} or the inner part
        alone. Descriptions of another form are left out: the chat template rejects them or makes sense of
        them."""
        given = descriptions if isinstance(descriptions, Sequence) else ()
        inner = [tool.get("function", tool) for tool in given if isinstance(tool, Mapping)]
        found = cls()
        for each in inner:
            if isinstance(each, Mapping) and isinstance(name := each.get("name"), str) and name:
                parameters = each.get("parameters")
                schema = followed(parameters, parameters) if isinstance(parameters, Mapping) else {}
                found[name] = Tool(name, schema)
        return found

    def only(self, name: str) -> ToolSet:
        """The set of one of its tools."""
        return ToolSet({name: self[name]})


JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
IMPLIED_TYPES = {
    "additionalProperties": "object",
    "items": "array",
    "patternProperties": "object",
    "prefixItems": "array",
    "properties": "object",
    "required": "object",
}
"""Types of the values that a keyword is about."""
WORDS: dict[str, bool | None] = {"True": True, "False": False, "None": None}
MAX_EXACT = 2.0**53
"""Up to here, a double that is a whole number is this number and no other."""


def argument_of(tool: Tool, name: str, text: str) -> dict[str, Any]:
    """The argument that is written as text, by its name, with a value of a type that its schema allows: JSON
    or a Python literal, perhaps in quotes. A text that has no value of such a type is kept as it can be read.
    White space instead of a value is null where null is allowed, and otherwise no argument."""
    types = types_of(tool, name)
    if types <= {"string"}:
        return {name: text}

    if not text.strip() and "string" not in types:
        return {name: None} if "null" in types else {}

    values = list(readings(text, may_be_string="string" in types))
    found = (value for value in values if types & set(JSON_TYPES[type(value)]))
    return {name: next(found, text if "string" in types or not values else values[0])}


def readings(text: str, *, may_be_string: bool) -> Iterator[Any]:
    """The values that a text may stand for, the most likely first. may_be_string: whether it may also be a
    string without quotes, which Python's lists and dicts are then."""
    for _ in range(2):  # as it is, and in quotes
        try:
            value = decode_json(text)
        except (ValueError, RecursionError):
            try:
                value = WORDS[text] if may_be_string else decode_literal(text)
            except (ValueError, RecursionError, OverflowError, KeyError):
                return

        yield value
        if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
            yield int(value)
        if not isinstance(value, str):
            return

        text = value


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema enumerates; None if it does not."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def types_of(tool: Tool, name: str) -> set[str]:
    """The JSON types of an argument: the types that its schema names, and the schemas that it consists of or
    refers to. One that names none has the types of the values that it enumerates, or else the types that its
    keywords are about. Empty if there is no sign of any."""
    found: set[str] = set()
    waiting = [tool.properties.get(name)]
    references: set[str] = set()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue

        named = each.get("type")
        if named is None:
            named = [JSON_TYPES.get(type(value), ("",))[0] for value in values_of(each) or ()]
        if named == []:
            named = [implied for keyword, implied in IMPLIED_TYPES.items() if keyword in each]
        found |= {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        for keyword in ("allOf", "anyOf", "oneOf"):
            members = each.get(keyword)
            waiting += members if isinstance(members, list) else []
        reference = each.get("$ref")
        if is_local(reference) and reference not in references:
            references.add(reference)
            waiting.append(resolve(tool.parameters, reference))
    return found
