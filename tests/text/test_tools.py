"""Tool calls are found in completions in the formats of several models."""

from __future__ import annotations

import json

import pytest

from drift_sdk.results import ToolCall
from drift_sdk.text.tools import find_tool_calls, tool_names

NAMES = frozenset({"weather", "add"})
WEATHER = ToolCall(name="weather", arguments={"city": "Paris"})
ADD = ToolCall(name="add", arguments={"a": 1, "b": [2, {"c": None}]})
WEATHER_JSON = '{"name": "weather", "arguments": {"city": "Paris"}}'
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'
TRICKY = ToolCall(name="add", arguments={"text": "</tool_call> or <tool_call>{"})
TRICKY_JSON = json.dumps({"name": "add", "arguments": TRICKY.arguments})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # Hermes, Qwen
        (f"<tool_call>\n{WEATHER_JSON}\n</tool_call>", (WEATHER,)),
        (
            f"Let me see.\n<tool_call>{WEATHER_JSON}</tool_call>\n<tool_call>{ADD_JSON}</tool_call>",
            (WEATHER, ADD),
        ),
        (f"<tool_call>{WEATHER_JSON}", (WEATHER,)),
        (f"<tool_call>{TRICKY_JSON}</tool_call><tool_call>{ADD_JSON}</tool_call>", (TRICKY, ADD)),
        ('<tool_call>{"name": "now"}</tool_call>', (ToolCall(name="now", arguments={}),)),
        (
            f"<think><tool_call>{ADD_JSON}</tool_call>?</think><tool_call>{WEATHER_JSON}</tool_call>",
            (WEATHER,),
        ),
        # SmolLM2
        (f"<tool_call>[{WEATHER_JSON}, {ADD_JSON}]</tool_call>", (WEATHER, ADD)),
        ("<tool_call>[]</tool_call>", ()),
        # Llama 3
        ('{"name": "weather", "parameters": {"city": "Paris"}}', (WEATHER,)),
        (f"<|python_tag|>{WEATHER_JSON}", (WEATHER,)),
        (f" {WEATHER_JSON}; {ADD_JSON}\n", (WEATHER, ADD)),
        # Malformed calls are skipped.
        (f"<tool_call>{WEATHER_JSON[:-1]}</tool_call><tool_call>{ADD_JSON}</tool_call>", (ADD,)),
        (f"<tool_call>[{WEATHER_JSON}, 7, {{}}]</tool_call>", (WEATHER,)),
        ('<tool_call>{"name": "add", "arguments": "text"}</tool_call>', ()),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', ()),
        ("<tool_call>", ()),
        ("<tool_call>" + "[" * 100_000, ()),
        ("<tool_call>" + "9" * 10_000, ()),
        # Text and JSON that are not calls.
        ("", ()),
        ("It is sunny.", ()),
        (f"I would say {WEATHER_JSON}", ()),
        (f"{WEATHER_JSON} is what I would say", ()),
        (f'{WEATHER_JSON} {{"name": "Bob", "parameters": {{}}}}', ()),
        (f"{WEATHER_JSON} 7", ()),
        ('{"name": "Bob", "arguments": {}}', ()),
        ('{"weather": "sunny"}', ()),
        ("[" * 100_000, ()),
    ],
)
def test_calls_are_found_in_a_text(text: str, calls: tuple[ToolCall, ...]) -> None:
    assert find_tool_calls(text, NAMES) == calls


def test_every_prefix_of_a_text_is_parsed_without_error() -> None:
    text = f"<think>x</think> <tool_call>[{WEATHER_JSON}]</tool_call> <tool_call>{TRICKY_JSON}</tool_call>"
    found = [len(find_tool_calls(text[:length], NAMES)) for length in range(len(text) + 1)]
    assert found == sorted(found)
    assert found[-1] == 2


def test_names_are_read_from_descriptions_of_tools() -> None:
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
        {"name": "add", "description": "Adds.", "parameters": {}},
        {"type": "function", "function": {}},
        {"type": "function", "function": None},
        {"name": 5},
        "text",
    ]
    assert tool_names(tools) == NAMES  # type: ignore[arg-type]  # the template rejects what is not a mapping
    assert tool_names(5) == tool_names([]) == frozenset()  # type: ignore[arg-type]
