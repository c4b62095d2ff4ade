"""Values of arguments that are written as text, by the types that a schema allows."""

from __future__ import annotations

from typing import Any

import pytest

from drift_sdk.text.tools import Tool, argument_of

NOTHING: dict[str, Any] = {}
NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, '"true"', True),
        ({"type": "boolean"}, "'False'", False),
        ({"type": "null"}, "None", None),
        (NULLABLE, "None", None),
        (NULLABLE, "null", None),
        (NULLABLE, '"3"', 3),
        ({"type": "integer"}, '"3"', 3),
        ({"type": "integer"}, "'-3'", -3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "+3", 3),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "number"}, '"2.5"', 2.5),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "array"}, '"[1, 2]"', [1, 2]),
        ({"type": "object"}, "{'a': {'b': False}}", {"a": {"b": False}}),
        ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"type": ["string", "integer"]}, '"3"', "3"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": ["string", "array"]}, "(1, 2)", "(1, 2)"),
        ({"type": ["string", "integer"]}, "3.5", "3.5"),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, '"3"', '"3"'),
        ({"type": "string"}, "", ""),
        ({}, "3", "3"),
        # without a value of the type
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "3.5", 3.5),
        ({"type": "integer"}, "None", None),
        ({"type": "integer"}, "1e999", 1.7976931348623157e308),
        ({"type": "boolean"}, "1", 1),
    ],
)
def test_value_has_a_type_of_the_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    found = argument_of(Tool("f", {"properties": {"a": schema}}), "a", text)["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_white_space_is_null_or_no_argument(text: str) -> None:
    for schema, expected in (
        ({"type": "integer"}, NOTHING),
        ({"type": "boolean"}, NOTHING),
        ({"enum": [1, 2]}, NOTHING),
        (NULLABLE, {"a": None}),
        ({"type": ["string", "integer"]}, {"a": text}),
    ):
        assert argument_of(Tool("f", {"properties": {"a": schema}}), "a", text) == expected
