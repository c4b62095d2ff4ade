"""Tool calls in a completion's text.

The text alone decides how it is read, for that is what is known of a model: templates tell how calls are
written into a prompt, in too many ways to be read back, and tags that are special tokens (Llama's
<|python_tag|>) are not in the text at all.

- Between <tool_call> tags, one call or a list of them: Hermes, Qwen, SmolLM2. What a model thinks before
  </think> is not said.
- Without tags, when the text is nothing but calls, one after the other, and all of them of tools that were
  given: Llama 3. Such a model may answer in JSON too, hence the care.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from drift_sdk.results import ToolCall

__all__ = ["find_tool_calls", "tool_names"]

TAG = "<tool_call>"
BETWEEN = re.compile(r"[\s;]*")

decoder = json.JSONDecoder()


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of functions, described as chat templates take them: {"type": "function", "function": {...}}
    or the inner part alone. What is not of this form has no name."""
    given = tools if isinstance(tools, Sequence) else ()
    descriptions = [tool.get("function", tool) for tool in given if isinstance(tool, Mapping)]
    names = [each.get("name") for each in descriptions if isinstance(each, Mapping)]
    return frozenset(name for name in names if isinstance(name, str))


def find_tool_calls(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in a text, in their order; those that are not well-formed are passed over.

    names: of the tools that were given. A tagged call of another name is reported too: it was meant.
    """
    said = text.rpartition("</think>")[2]
    if TAG in said:
        return find_tagged(said)

    calls = find_bare(said.strip().removeprefix("<|python_tag|>"))
    return calls if all(call.name in names for call in calls) else ()


def find_tagged(text: str) -> tuple[ToolCall, ...]:
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
    """The JSON value from `position` on and where the next thing begins; ValueError if there is none."""
    try:
        value, end = decoder.raw_decode(text, skip_blanks(text, position))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error

    return value, skip_blanks(text, end)


def skip_blanks(text: str, position: int) -> int:
    match = BETWEEN.match(text, position)
    return match.end() if match is not None else position


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None

    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None

    return ToolCall(name=name, arguments=arguments)
