"""Content blocks of Anthropic's Messages, as messages in the form that engines take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from drift_sdk import RequestError
from drift_sdk.openai.wire import Wire, convert

__all__ = ["InputMessage", "messages_of"]

Blocks = str | list[dict[str, Any]]


class InputMessage(Wire, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolUseBlock(Wire, kw_only=True):
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(Wire, kw_only=True):
    """is_error has no effect: chat templates know no failed results, and the content tells of them."""

    tool_use_id: str
    content: Blocks | None = None


class ThinkingBlock(Wire, kw_only=True):
    thinking: str


class TextBlock(Wire, kw_only=True):
    text: str


def messages_of(
    system: Blocks | None, messages: Sequence[InputMessage]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages of a request, and their paths, or those of their parts -> the paths of what they were made
    of. RequestError for a block that has no place in them."""
    if not messages:
        raise RequestError.of("messages", messages, "at least one message")

    found: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    if system:
        found.append({"role": "system", "content": parts_of(system)})
        places["messages[0].content"] = "system"
    for index, message in enumerate(messages):
        place = f"messages[{index}].content"
        places[f"messages[{len(found)}].content"] = place
        if message.role == "assistant":
            found.append(answer_of(message.content, place))
        elif message.role == "system" or isinstance(message.content, str):
            found.append({"role": message.role, "content": parts_of(message.content)})
        else:
            add_asked(found, places, message.content, place)
    return found, places


def add_asked(
    found: list[dict[str, Any]], places: dict[str, str], blocks: Sequence[dict[str, Any]], place: str
) -> None:
    """Add the messages that a user's blocks make: one for each result of a tool, and one for those between
    them."""
    if not blocks:
        raise RequestError.of(place, blocks, "at least one block")

    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block.get("type") == "tool_result":
            places[f"messages[{len(found)}].content"] = f"{where}.content"
            found.append(result_of(block, where))
            continue

        if number == 0 or found[-1]["role"] == "tool":
            found.append({"role": "user", "content": []})
        parts = found[-1]["content"]
        places[f"messages[{len(found) - 1}].content[{len(parts)}]"] = where
        parts += parts_of([block])


def parts_of(blocks: Blocks) -> Blocks:
    """Blocks as parts. What a prompt has no use for, such as marks of a cache, is left out of those of text;
    engines name the blocks of other types."""
    if isinstance(blocks, str):
        return blocks

    return [
        {"type": "text", "text": block.get("text")} if block.get("type") == "text" else block
        for block in blocks
    ]


def result_of(block: dict[str, Any], place: str) -> dict[str, Any]:
    """The message that the result of a tool makes."""
    result = convert(without_nulls(block), ToolResultBlock, place)
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": parts_of(result.content or "")}


def answer_of(blocks: Blocks, place: str) -> dict[str, Any]:
    """The message that the assistant's blocks make. Texts are joined: they are pieces of one answer."""
    if isinstance(blocks, str):
        return {"role": "assistant", "content": blocks}

    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, given in enumerate(blocks):
        block, where = without_nulls(given), f"{place}[{index}]"
        match block.get("type"):
            case "text":
                texts.append(convert(block, TextBlock, where).text)
            case "thinking":
                thoughts.append(convert(block, ThinkingBlock, where).thinking)
            case "redacted_thinking":
                pass  # encrypted by another server
            case "tool_use":
                use = convert(block, ToolUseBlock, where)
                function = {"name": use.name, "arguments": use.input}
                calls.append({"id": use.id, "type": "function", "function": function})
            case kind:
                allowed = "one of text, thinking, redacted_thinking and tool_use"
                raise RequestError.of(f"{where}.type", kind, allowed)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def without_nulls(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if value is not None}
