"""Schemas that exclude each other, and `oneOf` of these."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from drift_sdk.text import schemas as schemas_module
from drift_sdk.text.schemas import are_exclusive

WHOLE, TEXT = {"type": "integer"}, {"type": "string"}


def tagged(tag: object, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"], **more}


def closed(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: WHOLE}, "required": [name], "additionalProperties": False}


ROOT = {
    "$defs": {
        "a": tagged("a"),
        "b": {"allOf": [tagged("b")]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
        "list": {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/list"}}},
    }
}
VALUES = [None, True, 0, 1, 2.5, "a", "b", [], [1], {}]
VALUES += [{"kind": kind} for kind in (None, True, 1, "a", "b")] + [{"x": 1}, {"y": 1}, {"x": 1, "y": 1}]


@pytest.mark.parametrize(
    "schemas",
    [
        [WHOLE, TEXT, {"type": ["null", "boolean"]}, {"type": "array"}],
        [{"const": 1}, {"const": True}, {"const": "1"}, {"const": None}],
        [{"enum": ["a", "b"]}, {"enum": ["c"]}, WHOLE],
        [tagged("a"), tagged("b"), tagged(1), tagged(True)],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
        [closed("x"), closed("y")],
        [{"anyOf": [WHOLE, {"const": "a"}]}, {"const": "b"}],
        [{"allOf": [{"minLength": 1}, TEXT]}, WHOLE],
        [True, False],
        [],
    ],
)
def test_exclusive_schemas_are_found(schemas: list[Any]) -> None:
    assert are_exclusive([schemas], ROOT)
    for left, right in itertools.combinations(schemas, 2):
        both = Draft202012Validator({"allOf": [left, right], **ROOT})
        assert not [value for value in VALUES if both.is_valid(value)]


@pytest.mark.parametrize(
    "schemas",
    [
        [WHOLE, {"type": "number"}],
        [TEXT, {"const": "a"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [1]}, {"const": [2]}],
        [tagged("a"), {"type": "object", "required": ["x"]}],
        [{**tagged("a"), "type": ["object", "null"]}, {"properties": {"kind": {"const": "b"}}}],
        [{**closed(name), "patternProperties": {"x|y": WHOLE}} for name in "xy"],
        [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}],
        [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/list"}],
        [{"$ref": "#/$defs/missing"}, TEXT],
        [True, TEXT],
        "schemas",
        [1, 2],
    ],
)
def test_schemas_that_may_have_a_value_in_common(schemas: Any) -> None:
    assert not are_exclusive([schemas], ROOT)


def test_comparisons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = [{"const": number} for number in range(141)]
    assert are_exclusive([schemas], ROOT)
    assert not are_exclusive([schemas] * 2, ROOT)
    pairs = list(itertools.combinations(schemas[:10], 2))
    monkeypatch.setattr(schemas_module, "MAX_COMPARISONS", len(pairs))
    assert are_exclusive(map(list, pairs), ROOT)
    assert not are_exclusive([*map(list, pairs), schemas[:2]], ROOT)
