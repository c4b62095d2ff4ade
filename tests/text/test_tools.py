"""Descriptions of tools are read in both forms, and others are left out."""

from __future__ import annotations

from drift_sdk.text.tools import ToolSet


def test_tools_are_read_from_their_descriptions() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {}},
        "required": ["a", "z", 7],
    }
    tools = ToolSet.of(
        [
            {"type": "function", "function": {"name": "weather", "parameters": parameters}},
            {"name": "add", "description": "Adds."},
            {"type": "function", "function": {}},
            {"type": "function", "function": None},
            {"name": 5},
            {"name": "odd", "parameters": {"properties": 7, "required": "properties"}},
            "text",
        ]
    )
    assert list(tools) == ["weather", "add", "odd"]
    assert (set(tools["weather"].properties), tools["weather"].required) == ({"a", "b"}, {"a"})
    assert tools["add"].parameters == tools["odd"].properties == {} and not tools["odd"].required
    assert ToolSet.of(5) == ToolSet.of([]) == ToolSet.of(None) == {}
    assert list(tools.only("add")) == ["add"]
