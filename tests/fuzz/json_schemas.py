"""JSON schemas, valid and invalid: compiled, then used to generate a few tokens."""

from __future__ import annotations

import json
from typing import Any

from following import follow
from hypothesis import strategies as st

from drift_sdk import JsonSchema

NAMES = st.sampled_from(["a", "b", "minimum", "é", "\x00", "$ref", "const"])
COUNTS = st.integers(0, 4) | st.sampled_from([1.0, 2.5, 1000, 10**6, 2**32, 2**63, 2**64, 10**20, -1])
NUMBERS = (
    st.integers(-100, 100)
    | st.sampled_from(
        [sign * (base + by) for sign in (1, -1) for base in (2**53, 2**63, 10**18) for by in (-1, 0, 1)]
    )
    | st.floats()
)
PATTERNS = st.sampled_from(
    [
        r"^\d{2,5}$",
        r"\D",
        r".*a.*",
        "a?" * 300,
        "(a|b)*c{1,900}",
        r"^[\w-]+@\w+$",
        "(",
        r"\p{L}+",
        "^(?i)x$",
        r"\b",
    ]
) | st.text(max_size=8)
REFS = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/const", "#x", "http://x/y", "#/%24defs/a"]
)
DATA = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object", "nonsense"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    maps = st.dictionaries(NAMES, inner, max_size=4)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, max_size=3),
        "$ref": REFS,
        "$defs": maps,
        "properties": maps,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=3),
        "additionalProperties": inner,
        "propertyNames": inner,
        "uniqueItems": st.booleans(),
        "required": st.lists(NAMES, max_size=3),
        "items": inner,
        "prefixItems": lists,
        "allOf": lists | st.integers(2, 30).flatmap(lambda n: inner.map(lambda each: [each] * n)),
        "anyOf": lists,
        "oneOf": lists,
        "enum": st.lists(DATA, max_size=4),
        "const": DATA,
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "email", "uuid", "nonsense"]),
        "multipleOf": NUMBERS,
    }
    keywords |= dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], NUMBERS | DATA)
    counts = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
    keywords |= dict.fromkeys(counts, COUNTS)
    return st.fixed_dictionaries({}, optional=keywords)


def chain(length: int, schema: Any) -> dict[str, Any]:
    links = {f"r{i}": {"items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/r0", "$defs": links | {f"r{length}": schema}}


def links(length: int, schema: Any) -> dict[str, Any]:
    """A schema with a chain of direct references, and a choice of some of them."""
    found: dict[str, Any] = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(length)}
    choice = [{"$ref": f"#/$defs/r{i}"} for i in range(0, length, 7)]
    return {"anyOf": choice, "$defs": found | {f"r{length}": schema}}


def merge(length: int, schema: Any) -> dict[str, Any]:
    """A schema with objects that merge the same large one, and have various values of multipleOf."""
    users = {f"u{i}": {"allOf": [{"$ref": "#/$defs/large"}], "multipleOf": -i} for i in range(length)}
    return {"$ref": "#/$defs/large", "$defs": {"large": wide(min(length, 900), schema)} | users}


def nest(depth: int, schema: Any) -> Any:
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def wide(width: int, schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": schema for i in range(width)}}


plain = st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=8)
sizes = st.sampled_from([10, 98, 300, 900, 2000, 20_000])
strategy = plain | st.tuples(st.sampled_from([chain, links, merge, nest, wide]), sizes, plain)


def run(data: Any) -> None:
    schema = data[0](*data[1:]) if isinstance(data, tuple) else data
    follow(lambda: JsonSchema(schema if isinstance(schema, dict) else json.dumps(schema)))
