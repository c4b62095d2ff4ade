"""Finds tool calls in a completion's text.

How a text is parsed depends on the text alone. A chat template cannot be used for this: it defines how calls
are written into a prompt, in too many ways to be inverted, and tags that are special tokens (Llama's
<|python_tag|>) are not in the text.

- With <tool_call> tags (Hermes, Qwen, SmolLM2): each tag is followed by one call or a list of calls. Text
  before </think> is ignored.
- Without tags (Llama 3): the text consists of calls only, one after the other, and all of them name tools
  that were given. The condition is strict because such a model may also answer in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from drift_sdk.results import ToolCall

__all__ = ["find_tool_calls", "tool_names"]

TAG = "<tool_call>"
SEPARATORS = re.compile(r"[\s;]*")

decoder = json.JSONDecoder()


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of tools.

    tools: descriptions as chat templates take them, {"type": "function", "function": {...}} or the inner part
    alone. Descriptions of another form have no name.
    """
    given = tools if isinstance(tools, Sequence) else ()
    descriptions = [tool.get("function", tool) for tool in given if isinstance(tool, Mapping)]
    names = [each.get("name") for each in descriptions if isinstance(each, Mapping)]
    return frozenset(name for name in names if isinstance(name, str))


def find_tool_calls(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in a text, in their order. Calls that are not well-formed are skipped.

    names: names of the tools that were given. Tagged calls of other names are included, because the tag shows
    that a call was intended.
    """
    answer = text.rpartition("</think>")[2]
    if TAG in answer:
        return find_tagged(answer)

    calls = find_bare(answer.strip().removeprefix("<|python_tag|>"))
    return calls if all(call.name in names for call in calls) else ()


def find_tagged(text: str) -> tuple[ToolCall, ...]:
    """The calls after <tool_call> tags."""
    calls: list[ToolCall] = []
    position = text.find(TAG)
    while position >= 0:
        position += len(TAG)
        try:
            value, position = read_json(text, position)
        except ValueError:
            pass
        else:
            calls += [call for item in as_list(value) if (call := as_call(item)) is not None]

        position = text.find(TAG, position)

    return tuple(calls)


def find_bare(text: str) -> tuple[ToolCall, ...]:
    """The calls of a text that consists of calls only; otherwise none."""
    calls: list[ToolCall | None] = []
    position = 0
    while position < len(text):
        try:
            value, position = read_json(text, position)
        except ValueError:
            return ()

        calls += map(as_call, as_list(value))

    found = [call for call in calls if call is not None]
    return tuple(found) if len(found) == len(calls) else ()


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at `position`, and the position after it and the separators that follow.

    Raises ValueError if there is no JSON value.
    """
    try:
        value, end = decoder.raw_decode(text, skip_separators(text, position))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error

    return value, skip_separators(text, end)


def skip_separators(text: str, position: int) -> int:
    match = SEPARATORS.match(text, position)
    return match.end() if match is not None else position


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_call(value: Any) -> ToolCall | None:
    """The call that a JSON value describes; None if it describes none."""
    if not isinstance(value, dict):
        return None

    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None

    return ToolCall(name=name, arguments=arguments)
