"""Conversations as plain data, in the form that chat templates take: the keys of messages and of tools.

They are types for annotations. Where they are accepted, any other mapping is too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    Any,
    Literal,
    Required,  # pydantic takes no other TypedDict before Python 3.12
)

from typing_extensions import TypedDict

__all__ = ["CalledFunction", "FunctionSpec", "Message", "MessageCall", "TextPart", "ToolSpec"]


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(TypedDict):
    """The function of a call. Its arguments are a mapping, or a JSON object as text."""

    name: str
    arguments: Mapping[str, Any] | str


class MessageCall(TypedDict, total=False):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: Required[CalledFunction]


class Message(TypedDict, total=False):
    """A message of a conversation, as `Engine.chat` takes it: a dict.

    role:              "system", "user", "assistant", "tool" or another one that the model's template knows.
    content:           the text, or a list of text parts.
    name:              of the author, or of the tool that answers.
    reasoning_content: what the assistant thought before it answered.
    tool_calls:        calls of the assistant.
    tool_call_id:      the id of the call that a tool answers.
    """

    role: Required[str]
    content: str | Sequence[TextPart] | None
    name: str
    reasoning_content: str
    tool_calls: Sequence[MessageCall]
    tool_call_id: str


class FunctionSpec(TypedDict, total=False):
    """A function that a model can call.

    parameters: JSON schema of its arguments, an object.
    strict:     for templates that show it; the engine itself enforces schemas with `tool_choice`.
    """

    name: Required[str]
    description: str
    parameters: Mapping[str, Any]
    strict: bool


class ToolSpec(TypedDict):
    """A tool that a model can call, as `Engine.chat` takes it: a dict. The function alone is accepted too.

    type:     "function".
    function: a mapping with `name`, `description` and `parameters`, the JSON schema of the arguments.
    """

    type: Literal["function"]
    function: FunctionSpec
