"""References in schemas mean the same wherever a part of a schema is put."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from drift_sdk.text.schemas import MAX_STEPS, followed, part_of, resolve

TREE: dict[str, Any] = {
    "$id": "https://example.com/tree",
    "type": "object",
    "properties": {
        "size": {"enum": [1, {"$ref": "#/properties/size"}]},
        "a/b~c é%": {"type": "boolean"},
        "same": {"$ref": "#/properties/a~1b~0c%20%C3%A9%25"},
        "child": {"$ref": "#"},
        "$ref": {"$ref": "#/$defs/name"},
        "default": {"items": {"$ref": "#/properties/size"}},
        "any": True,
    },
    "$defs": {"name": {"type": "string"}},
    "required": ["size"],
}


def test_pointers_are_resolved() -> None:
    assert resolve(TREE, "#") is TREE and resolve(TREE, "#/required/0") == "size"
    assert resolve(TREE, "#/properties/a~1b~0c%20%C3%A9%25") == {"type": "boolean"}
    for wrong in ("#/required/1", "#/required/x", "#/type/0", "#/none", "#/properties/none/type"):
        assert resolve(TREE, wrong) is None


def test_schema_is_joined_with_what_it_refers_to() -> None:
    root: dict[str, Any] = {
        "$defs": {
            "a": {"allOf": [{"$ref": "#/$defs/b"}], "title": "A"},
            "b": {"type": "string", "title": "B", "enum": ["x"]},
            "loop": {"$ref": "#/$defs/loop"},
            "several": {"allOf": [{"type": "string"}, {"minLength": 1}]},
        }
    }

    def found(schema: dict[str, Any]) -> dict[str, Any]:
        return dict(followed(schema, root))

    assert found({"$ref": "#/$defs/a"}) == {"type": "string", "title": "A", "enum": ["x"]}
    assert found({"$ref": "#/$defs/b", "type": "string", "title": "C"})["title"] == "C"
    kept: dict[str, Any]
    for kept in (
        {"$ref": "#/$defs/b", "enum": ["x", "y"]},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/b"},
        {"$ref": "#/$defs/loop"},
        {"$ref": 7},
        root["$defs"]["several"],
    ):
        assert found(kept) == kept
    chain = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(2 * MAX_STEPS)}
    assert followed(chain["0"], {"$defs": chain}) == {"$ref": f"#/$defs/{MAX_STEPS + 1}"}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("size", [1, {"$ref": "#/properties/size"}], [2, "1"]),
        ("same", [True], ["a"]),
        ("child", [{"size": 1}, {"size": 1, "child": {"size": 1}}], [{}, {"size": 1, "child": {}}, 1]),
        ("$ref", ["a"], [1]),
        ("default", [[1]], [[2]]),
        ("any", [1, "a"], []),
    ],
)
def test_part_means_the_same_by_itself(name: str, right: list[Any], wrong: list[Any]) -> None:
    part = part_of(TREE, "properties", name)
    inside = part_of(TREE)
    whole = {"properties": {"tree": inside}, "$defs": inside.pop("$defs")}
    for value in right + wrong:
        is_right = value in right
        assert jsonschema.Draft202012Validator(part).is_valid(value) == is_right
        tree = {"tree": {"size": 1, name: value}}
        assert jsonschema.Draft202012Validator(whole).is_valid(tree) == is_right


def test_part_that_refers_to_definitions_alone_has_these_alone() -> None:
    root = {"properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "string"}}, "$defs": {"x": {"const": 1}}}
    assert part_of(root) == root
    assert part_of(root, "properties", "a") == {"$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}
