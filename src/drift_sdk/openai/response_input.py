"""Input items of OpenAI's Responses, as messages in the form that engines take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drift_sdk import RequestError
from drift_sdk.openai.conversation import ROLES, as_parts
from drift_sdk.openai.wire import Wire, convert

__all__ = ["messages_of"]

STATEFUL = "an item with its content: this server keeps no items"


class TextItem(Wire, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]


class CallItem(Wire, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""


class ResultItem(Wire, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]] = ""


class ReasoningText(Wire, kw_only=True):
    text: str


class ReasoningItem(Wire, kw_only=True):
    """Reasoning that is only there encrypted is left out: it is of another server."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


KINDS: dict[str, type[TextItem] | type[CallItem] | type[ResultItem] | type[ReasoningItem]] = {
    "message": TextItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


class Conversation:
    """Messages, to which items are added. Reasoning, text and calls of one answer are items of their own, and
    become one message.

    places: path of a message -> path of the item that it was made of, the newest of several.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def add(self, item: TextItem | CallItem | ResultItem | ReasoningItem, place: str) -> None:
        self._add(item)
        self.places[f"messages[{len(self.messages) - 1}]"] = place

    def _add(self, item: TextItem | CallItem | ResultItem | ReasoningItem) -> None:
        match item:
            case ReasoningItem():
                if item.text:
                    self._answer(unless=("content", "tool_calls"))["reasoning_content"] = item.text
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._answer(unless=()).setdefault("tool_calls", []).append(call)
            case TextItem(role="assistant"):
                self._answer(unless=("content", "tool_calls"))["content"] = as_parts(item.content)
            case TextItem():
                role = ROLES.get(item.role, item.role)
                self.messages.append({"role": role, "content": as_parts(item.content)})
            case ResultItem():
                content = as_parts(item.output)
                self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _answer(self, unless: Sequence[str]) -> dict[str, Any]:
        """The last message if it is the assistant's and has none of these fields, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in unless):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages of a request, and the path of each -> the path of its item. RequestError for an item of
    another kind, with its place."""
    conversation = Conversation()
    if instructions is not None:
        conversation.add(TextItem(role="system", content=instructions), "instructions")
    if isinstance(given, str):
        conversation.add(TextItem(role="user", content=given), "input")
    elif not given:
        raise RequestError.of("input", given, "at least one item")
    else:
        for index, values in enumerate(given):
            conversation.add(item_of(values, f"input[{index}]"), f"input[{index}]")
    return [{"content": "", **message} for message in conversation.messages], conversation.places


def item_of(values: Mapping[str, Any], place: str) -> TextItem | CallItem | ResultItem | ReasoningItem:
    kind = values.get("type") or "message"
    if not isinstance(kind, str) or kind not in KINDS:
        allowed = STATEFUL if kind == "item_reference" else f"one of {', '.join(KINDS)}"
        raise RequestError.of(f"{place}.type", kind, allowed)

    return convert({"type": "message", **without_nulls(values)}, KINDS[kind], place)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
