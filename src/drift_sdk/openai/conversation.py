"""Messages and tools of OpenAI's chat protocol, in the form that engines take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drift_sdk import RequestError
from drift_sdk.openai.answer_parts import ToolUse
from drift_sdk.openai.wire import Wire, convert

__all__ = ["CHOICES", "Message", "Tools", "as_parts", "described_tool", "effort_args"]

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[\w.-]+")
CHOICES = ("none", "auto", "required")
ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates know by another name."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part with text -> its field. Engines know the type "text" alone."""


def as_parts(content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """The content of a message. Parts other than text are left to the engine, which names those that the
    model does not take."""
    if isinstance(content, str):
        return content

    return [
        {"type": "text", "text": part.get(field)}
        if (field := TEXT_PARTS.get(str(part.get("type")))) is not None
        else part
        for part in content
    ]


class CalledFunction(Wire, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Wire, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Wire, kw_only=True):
    """Of the fields of the protocol that are not here, `audio` is refused by `plain`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None

    def plain(self, place: str) -> dict[str, Any]:
        """The message in the form that engines take. place: its path in the request, for errors."""
        if self.audio is not None:
            raise RequestError.of(f"{place}.audio", self.audio, "null: audio is not supported")

        content = self.content if self.content is not None else self.refusal or ""
        plain: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": as_parts(content)}
        calls = list(self.tool_calls or [])
        if self.function_call is not None:  # the older form of a call
            calls.append(Call(function=self.function_call))
        if calls:
            plain["tool_calls"] = [call.plain() for call in calls]
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        return plain


class Tools:
    """The tools of a request, and which of them the answer may or must call.

    offered: descriptions in the form that engines take; None = there are none.
    choice:  the engine's `tool_choice`.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str,
        *,
        names: Sequence[str] | None = None,
        is_parallel: bool = True,
    ) -> None:
        """choice: "none", "auto" or "required". names: the tools that may be called; None = all.

        Of tools that may not be called, the model sees nothing."""
        if len(tools) > MAX_TOOLS:
            raise RequestError.of("tools", len(tools), f"at most {MAX_TOOLS} tools")

        for name in names or ():
            if name not in (known := [tool["function"]["name"] for tool in tools]):
                allowed = f"one of {', '.join(map(repr, known))}" if known else "none, as there are no tools"
                raise RequestError.of("tool_choice", name, allowed)

        kept = [tool for tool in tools if names is None or tool["function"]["name"] in names]
        self.offered = kept or None
        self.choice = choice
        self.use = ToolUse(is_forced=choice == "required", max_calls=None if is_parallel else 1)

    @classmethod
    def calling(cls, tools: Sequence[Mapping[str, Any]], name: str) -> Tools:
        """Tools of which one has to be called, once; the model sees all."""
        if name in CHOICES:
            raise RequestError.of("tool_choice", name, "a tool of another name, to force its call")

        made = cls(tools, "required", is_parallel=False)
        made.choice = name
        return made


def described_tool(description: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A tool in the form that engines take. Fields of the function that the protocol does not have are kept,
    because a chat template may use them.

    description: name, description and parameters of a function. place: its path in the request."""
    name = description.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise RequestError.of(f"{place}.name", name, "letters, digits, _, - and .")

    function = {key: value for key, value in description.items() if value is not None}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    convert(function["parameters"], dict[str, Any], f"{place}.parameters")
    return {"type": "function", "function": function}


def effort_args(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates that set how long a model reasons."""
    if effort is None:
        return {}

    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
