"""References inside JSON schemas: followed, and kept when a part becomes a schema by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import quote, unquote

__all__ = [
    "ANNOTATIONS",
    "DEFINITIONS",
    "followed",
    "is_local",
    "is_number",
    "part_of",
    "resolve",
    "schemas_in",
]

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
