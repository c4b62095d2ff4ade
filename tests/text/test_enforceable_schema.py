"""Texts that rewritten schemas permit, compared with what jsonschema says of the schemas themselves."""

from __future__ import annotations

import datetime
import decimal
import enum
import itertools
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pydantic
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, SecretStr

from drift_sdk import JsonSchema, Lark, RequestError
from drift_sdk.testing import byte_tokenizer
from drift_sdk.text.grammar import GrammarConstraint, constrain
from drift_sdk.text.schemas import FORMATS, enforceable

TOKENIZER = byte_tokenizer()
EOS = 256
NUMBERS = [
    text
    for length in range(1, 5)
    for text in map("".join, itertools.product("-.015", repeat=length))
    if re.fullmatch(r"-?(0|[15][015]*)(\.[015]+)?", text)
]


def start(grammar: Any) -> GrammarConstraint:
    return constrain(grammar, TOKENIZER, vocab_size=257, eos_token_ids=(EOS,))


def accepts(grammar: Any, *values: object) -> list[bool]:
    """Whether the grammar permits each value as JSON; a string is JSON text itself."""
    return [accepts_text(grammar, value if isinstance(value, str) else json.dumps(value)) for value in values]


def accepts_text(grammar: Any, text: str) -> bool:
    constraint = start(grammar)
    data = text.encode()
    *_, last = constraint.masks(data)
    return bool(int(last[EOS // 32]) >> EOS % 32 & 1)


def permitted(grammar: Any, alphabet: bytes, most: int) -> set[str]:
    """All texts of the grammar over an alphabet, up to a number of characters."""
    constraint = start(grammar)
    found, waiting = set(), [b""]
    while waiting:
        text = waiting.pop()
        row = np.unpackbits(constraint.masks(text)[-1].view(np.uint8), bitorder="little")
        if row[EOS]:
            found.add(text.decode())
        if len(text) < most:
            waiting += [text + bytes([char]) for char in alphabet if row[char]]
    return found


def bounds(values: tuple[float, ...]) -> Iterator[dict[str, float]]:
    for low, high in itertools.product(
        [None, *itertools.product(("minimum", "exclusiveMinimum"), values)],
        [None, *itertools.product(("maximum", "exclusiveMaximum"), values)],
    ):
        yield dict(each for each in (low, high) if each)


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_every_pair_of_bounds_is_enforced(kind: str) -> None:
    wrong = {}
    for pair in bounds((-5, -1, -0.5, 0, 0.05, 0.5, 1, 1.5)):
        schema = {"type": kind, **pair}
        validator = Draft202012Validator(schema)
        valid = {text for text in NUMBERS if validator.is_valid(json.loads(text))}
        if kind == "integer":
            valid = {text for text in valid if "." not in text}
        try:
            found = permitted(JsonSchema(schema), b"-.015", 4)
        except RequestError:
            found = set()
        # Not every spelling of a number is permitted, such as -0 or 0.50, but every number is.
        if found - valid or {json.loads(text) for text in valid} != {json.loads(text) for text in found}:
            wrong[str(pair)] = sorted(valid ^ found)
    assert not wrong


@pytest.mark.parametrize("multiple", [0.1, 0.5, 1.5, 3])
def test_bounds_are_enforced_beside_multiples(multiple: float) -> None:
    for pair in bounds((-0.5, 0, 1, 1.5)):
        schema = {"type": "number", "multipleOf": multiple, **pair}
        inside = Draft202012Validator(pair)
        valid = {
            text
            for text in NUMBERS
            if inside.is_valid(json.loads(text))
            and not decimal.Decimal(text) % decimal.Decimal(str(multiple))
        }
        try:
            found = permitted(JsonSchema(schema), b"-.015", 4)
        except RequestError:
            found = set()
        assert found <= valid, schema
        assert {json.loads(text) for text in valid} == {json.loads(text) for text in found}, schema


class Share(BaseModel):
    value: float = Field(gt=0, le=0.5)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (Share, ['{"value": 0.5}', '{"value": 0.000000000000000001}'], ['{"value": 0}', '{"value": 0.0}']),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, [0.5], [0, "0.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}, [0.25], [0, 0.2]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}]}, [0.5], [0, "0.00", "-0"]),
        ({"type": "number", "exclusiveMaximum": 0, "anyOf": [{"minimum": -0.5}]}, [-0.5], [0, "-0", "-0.0"]),
        ({"exclusiveMinimum": 999, "maximum": 999.5, "type": "number"}, [999.5, 999.000000000001], [999]),
        ({"exclusiveMinimum": 10**14, "type": "number"}, [10**14 + 1], [10**14]),
        ({"exclusiveMinimum": 2**53, "type": "integer"}, [2**53 + 2], [2**53]),
        ({"exclusiveMaximum": -(2**53), "type": "integer"}, [-(2**53) - 2], [-(2**53)]),
        ({"exclusiveMinimum": 2**53 - 1, "type": "integer"}, [2**53], [2**53 - 1]),
        ({"exclusiveMinimum": -1, "type": "integer"}, [0], [-1]),
        ({"exclusiveMinimum": "1", "type": "string"}, ['"a"'], []),
        ({"properties": {"exclusiveMinimum": {"type": "null"}}}, ['{"exclusiveMinimum": null}'], []),
        (
            Lark('start: "<" %json {"exclusiveMinimum": 5, "maximum": 5.5, "type": "number"} ">"'),
            ["<5.5>"],
            ["<5>"],
        ),
    ],
)
def test_exclusive_bounds_are_not_permitted(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    grammar = schema if isinstance(schema, Lark) else JsonSchema(schema)
    assert all(accepts(grammar, *right))
    assert not any(accepts(grammar, *wrong))


@pytest.mark.parametrize("number", [100.00000000000001, 1234567.123456789, -33.33333333333333, 0.3])
@pytest.mark.parametrize("keyword", ["minimum", "const"])
def test_numbers_are_exact_or_refused(keyword: str, number: float) -> None:
    grammar = JsonSchema({"type": "number", keyword: number})
    if number == 100.00000000000001:  # llguidance would take it for 100
        with pytest.raises(RequestError, match=f"{keyword}=100.00000000000001: expected at most 15 signif"):
            start(grammar)
    else:
        assert accepts(grammar, number, float(np.nextafter(number, -1e9))) == [True, False]


class Colour(enum.Enum):
    RED = "red"
    BLUE = 'b"|.'


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    lives: int


def model(kind: Any) -> type[BaseModel]:
    return pydantic.create_model("Model", x=(kind, ...))


TIME_ID = "d9428888-122b-11e1-b85c-61cd3cbb3210"


@pytest.mark.parametrize(
    ("kind", "value", "text", "wrong"),
    [
        (model(set[int]), {1, 2}, '{"x": [1, 2, 1]}', '{"x": ["a"]}'),
        (model(frozenset[str]), frozenset("a"), '{"x": ["a"]}', '{"x": [1]}'),
        (model(Annotated[set[int], Field(min_length=1)]), {1}, '{"x": [1]}', '{"x": []}'),
        (model(Path), Path("/a"), '{"x": "/a"}', '{"x": 1}'),
        (model(bytes), b"a", '{"x": "a"}', '{"x": 1}'),
        (model(SecretStr), SecretStr("a"), '{"x": "a"}', '{"x": null}'),
        (model(pydantic.UUID1), uuid.UUID(TIME_ID), f'{{"x": "{TIME_ID}"}}', '{"x": 1}'),
        (model(dict[Literal["a", "b"], int]), {"b": 1, "a": 2}, '{"x": {"b": 1, "a": 2}}', '{"x": {"c": 1}}'),
        (model(dict[Colour, int]), {Colour.BLUE: 1}, r'{"x": {"b\"|.": 1}}', '{"x": {"b": 1}}'),
        (
            model(dict[Annotated[str, Field(max_length=2)], int]),
            {"ab": 1},
            '{"x": {"ab": 1}}',
            '{"x": {"abc": 1}}',
        ),
        (
            model(dict[datetime.date, int]),
            {datetime.date(2024, 1, 2): 1},
            '{"x": {"2024-01-02": 1}}',
            '{"x": 1}',
        ),
        (
            pydantic.create_model("Owner", pet=(Cat | Dog, Field(discriminator="kind"))),
            Dog(kind="dog", lives=1),
            '{"pet": {"kind": "dog", "lives": 1}}',
            '{"pet": {"kind": "cow", "lives": 1}}',
        ),
        (decimal.Decimal, decimal.Decimal("-1.50"), '"-1.50"', '"1 EUR"'),
        (set[int], {1, 2}, "[1, 2, 2]", '["a"]'),
        (frozenset[str], frozenset("a"), '["a"]', "[1]"),
        (dict[Annotated[str, msgspec.Meta(pattern="^a")], int], {"ab": 1}, '{"ab": 1}', '{"b": 1}'),
    ],
)
def test_ordinary_types_are_schemas(kind: Any, value: Any, text: str, wrong: str) -> None:
    grammar = JsonSchema(kind)
    found = grammar.decode(text)
    if isinstance(found, BaseModel):
        (found,) = dict(found).values()
    assert found == value and type(found) is type(value)
    assert accepts(grammar, text, wrong) == [True, False]


def test_every_enforced_format_is_known_to_llguidance_and_others_are_annotations() -> None:
    for name in FORMATS - {"unknown"}:
        assert accepts(JsonSchema({"type": "string", "format": name}), '"?"') == [False]
    for name in ("path", "int32", "idn-email", "date_time", ""):
        grammar = JsonSchema({"items": {"anyOf": [{"type": "string", "format": name}, {"format": name}]}})
        assert accepts(grammar, '["?"]', "[7]") == [True, True]
    with pytest.raises(RequestError, match="Expected string for 'format', got 3"):
        start(JsonSchema({"type": "string", "format": 3}))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"a"', '"ab"'], ['""', '"abc"']),
        ({"type": "array", "minItems": 1.0, "uniqueItems": False}, [[1, 1]], [[]]),
        ({"type": "object", "maxProperties": 0.0}, [{}], [{"a": 1}]),
    ],
)
def test_whole_counts_and_keywords_that_restrict_nothing(
    schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    assert all(accepts(JsonSchema(schema), *right))
    assert not any(accepts(JsonSchema(schema), *wrong))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "string", "minLength": 1.5},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        {"propertyNames": {"not": {"const": "a"}}},
        {"propertyNames": {"minLength": 1, "pattern": "a"}},
        {"propertyNames": {"enum": "a"}},
        {"propertyNames": {"minLength": 1}, "patternProperties": {"a": True}},
        {"propertyNames": {"minLength": 1}, "properties": {"a": True}},
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: Any) -> None:
    name = next(name for name in ("uniqueItems", "minLength", "oneOf", "propertyNames") if name in schema)
    with pytest.raises(RequestError, match=f"JsonSchema cannot be compiled: .*{name}"):
        start(JsonSchema(schema))


WHOLE = {"type": "integer"}
OBJECTS: list[dict[str, object]] = [
    {},
    {"a": 1},
    {"b": 1, "a": 2},
    {"a": "x"},
    {"bc": 1},
    {"ab": 1},
    {"c": 3},
]


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"enum": ["a", "b", 7]}},
        {"propertyNames": {"const": "a"}, "additionalProperties": WHOLE},
        {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"enum": ["a", "c"], "title": "N"}}},
        {"propertyNames": {"pattern": "a"}, "additionalProperties": WHOLE},
        {"propertyNames": {"type": "string", "minLength": 2.0}},
        {"propertyNames": {"maxLength": 1, "description": "short"}},
        {"propertyNames": {"minLength": 1, "maxLength": 1}, "additionalProperties": False},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": False},
        {"propertyNames": True},
        {"propertyNames": {"type": ["string", "null"]}, "additionalProperties": WHOLE},
        {
            "propertyNames": {"enum": ["a", "b"]},
            "properties": {"a": {"type": "string"}, "bc": WHOLE},
            "additionalProperties": WHOLE,
        },
        {"properties": {"a": WHOLE}, "allOf": [{"propertyNames": {"enum": ["a"]}}]},
    ],
)
def test_names_of_properties_are_enforced(schema: Any) -> None:
    validator = Draft202012Validator({"type": "object", **schema})
    grammar = JsonSchema({"type": "object", **schema})
    assert accepts(grammar, *map(json.dumps, OBJECTS)) == [validator.is_valid(each) for each in OBJECTS]


def test_schema_is_not_changed() -> None:
    schema = {
        "propertyNames": {"enum": ["a"]},
        "properties": {"b": {"exclusiveMinimum": 0}},
        "oneOf": [True, False],
    }
    before = json.dumps(schema)
    enforceable(schema)
    assert json.dumps(schema) == before
    assert enforceable(True) is True and enforceable([1]) == [1]
