"""Text of replies in the formats of tool calls and reasoning: what a model would have generated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from drift_sdk.errors import ConfigError
from drift_sdk.results import ToolCall
from drift_sdk.text.answers import tool_formats as marks
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.answers.reasoning import REASONING_FORMATS
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tools import Tool, ToolSet

__all__ = ["written"]

AT_START_ONLY = ("llama3_json", "pythonic")
"""Formats without a marker: their calls are found at the start of an answer."""


def written(template: ChatTemplate, *, text: str, tool_calls: Sequence[ToolCall], reasoning: str) -> str:
    """A reply in the formats of a model with this chat template: reasoning, text, calls. Without calls and
    reasoning it is the text itself.

    ConfigError for calls or reasoning if the model has no format for them, for text before calls that can
    only stand at the start of an answer, for arguments that are not JSON, and for calls that cannot be read
    back: the format has no quotes for a name in them, for example.
    """
    formats = template.formats
    check_expressible(formats, text=text, has_calls=bool(tool_calls), has_reasoning=bool(reasoning))
    try:
        for call in tool_calls:
            check_call(template, call)
        if formats.is_harmony and (tool_calls or reasoning):
            return harmony(text, tool_calls, reasoning)

        calls = write_calls(template, tool_calls) if tool_calls else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"tool_calls: expected arguments that are JSON: {error}", field="tool_calls"
        ) from error

    thought = ""
    if reasoning:
        reasoning_format = REASONING_FORMATS[formats.reasoning or ""]
        thought = f"{reasoning_format.openers[0]}{reasoning}{reasoning_format.closers[0]}"
    return f"{thought}{text}{calls}"


def check_expressible(formats: AnswerFormats, *, text: str, has_calls: bool, has_reasoning: bool) -> None:
    if has_calls and formats.tools is None:
        allowed = "none with EngineConfig.tool_format=None"
        raise ConfigError(f"tool_calls: expected {allowed}", field="tool_calls", allowed=allowed)

    if has_calls and (text or has_reasoning) and formats.tools in AT_START_ONLY:
        allowed = f"no text or reasoning before tool calls in the format {formats.tools}"
        raise ConfigError(f"tool_calls: expected {allowed}", field="tool_calls", allowed=allowed)

    if has_reasoning and formats.reasoning is None:
        allowed = 'an engine with a format of reasoning, such as EngineConfig(reasoning_format="think")'
        raise ConfigError(f"reasoning: expected {allowed}", field="reasoning", allowed=allowed)


def check_call(template: ChatTemplate, call: ToolCall) -> None:
    """ConfigError for a call that is not read back from the text that is written for it. TypeError and
    ValueError, of which UnicodeEncodeError is one, for arguments that are not JSON."""
    formats = template.formats
    if not isinstance(call.arguments, dict):
        raise TypeError(f"found {type(call.arguments).__name__}")

    arguments = json.loads(as_json(call.arguments))
    if formats.tools == "qwen3_coder":  # without a schema, values are read as text
        arguments = {name: as_text(value) for name, value in arguments.items()}
    text = write_calls(template, [call])
    text.encode()
    splitter = formats.splitter(ToolSet({call.name: Tool(call.name, {})}))
    found = (*splitter.push(text).tool_calls, *splitter.flush().tool_calls)
    if [(each.name, each.arguments) for each in found] != [(call.name, arguments)]:
        raise ConfigError.of("tool_calls", call, f"calls that the format {formats.tools} can express")


def write_calls(template: ChatTemplate, calls: Sequence[ToolCall]) -> str:
    if template.formats.is_harmony:
        return harmony("", calls, "")

    return CALLS[template.formats.tools or ""](calls, template.source)


def as_text(value: object) -> str:
    """A value where strings have no quotes."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def as_object(call: ToolCall, key: str = "arguments") -> str:
    """A call as a JSON object, with its id if it has one."""
    described: dict[str, Any] = {"name": call.name, key: call.arguments}
    if call.id:
        described["id"] = call.id
    return as_json(described)


def hermes(calls: Sequence[ToolCall], template: str) -> str:
    return "\n".join(f"<tool_call>\n{as_object(call)}\n</tool_call>" for call in calls)


def qwen3_coder(calls: Sequence[ToolCall], template: str) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={name}>\n{as_text(value)}\n</parameter>\n" for name, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def llama3_json(calls: Sequence[ToolCall], template: str) -> str:
    return "; ".join(as_object(call, "parameters") for call in calls)


def pythonic(calls: Sequence[ToolCall], template: str) -> str:
    shown = [
        f"{call.name}({', '.join(f'{name}={as_python(value)}' for name, value in call.arguments.items())})"
        for call in calls
    ]
    return f"[{', '.join(shown)}]"


def as_python(value: object) -> str:
    """A JSON value as a literal of Python."""
    if isinstance(value, bool) or value is None:
        return repr(value)

    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_python, value))}]"

    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_json(key)}: {as_python(each)}' for key, each in value.items())}}}"

    return as_json(value)


def mistral(calls: Sequence[ToolCall], template: str) -> str:
    if "[ARGS]" not in template:
        return f"[TOOL_CALLS][{', '.join(map(as_object, calls))}]"

    ids = (f"[CALL_ID]{call.id}" if call.id else "" for call in calls)
    return "".join(
        f"[TOOL_CALLS]{call.name}{call_id}[ARGS]{as_json(call.arguments)}"
        for call, call_id in zip(calls, ids, strict=True)
    )


def deepseek(calls: Sequence[ToolCall], template: str) -> str:
    is_fenced = "```json" in template
    shown = [
        f"{marks.CALL_BEGIN}function{marks.CALL_SEP}{call.name}\n```json\n{as_json(call.arguments)}\n```{marks.CALL_END}"
        if is_fenced
        else f"{marks.CALL_BEGIN}{call.name}{marks.CALL_SEP}{as_json(call.arguments)}{marks.CALL_END}"
        for call in calls
    ]
    between = "\n" if is_fenced else ""
    return f"{marks.CALLS_BEGIN}{between.join(shown)}{marks.CALLS_END}"


def granite(calls: Sequence[ToolCall], template: str) -> str:
    return f"<|tool_call|>[{', '.join(map(as_object, calls))}]"


def phi4_mini(calls: Sequence[ToolCall], template: str) -> str:
    return "".join(f"<|tool_call|>{as_object(call)}<|/tool_call|>" for call in calls)


def harmony(text: str, calls: Sequence[ToolCall], reasoning: str) -> str:
    messages = []
    if reasoning:
        messages.append(f"<|channel|>analysis<|message|>{reasoning}")
    if text:
        messages.append(f"<|channel|>final<|message|>{text}")
    messages += [
        f"<|channel|>commentary to=functions.{call.name} "
        f"<|constrain|>json<|message|>{as_json(call.arguments)}"
        for call in calls
    ]
    return "<|end|><|start|>assistant".join(messages)


CALLS: dict[str, Callable[[Sequence[ToolCall], str], str]] = {
    "json": hermes,
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek": deepseek,
    "granite": granite,
    "phi4_mini": phi4_mini,
}
"""Functions that write calls in each format, of the calls and the source of the chat template. They write
what the grammars of forced calls allow."""
