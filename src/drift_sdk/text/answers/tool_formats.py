"""The formats in which model families write tool calls, and a parser of each.

A call is read when one of its format's opening markers stands in the text, or for some formats at the start
of the answer. What is not in the format stays text, from the place where the call begins that fails; calls
before it are kept. A call is complete where its value closes: a closing marker behind it may be missing.

Names of tools that the model was not given are accepted behind a marker, which shows that a call was meant.
Without a marker, what looks like a call must name a tool that was given: such a model may also answer in JSON
or with a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from drift_sdk.text.answers.calls import CallReader, MalformedCall, is_name
from drift_sdk.text.answers.reader import Steps
from drift_sdk.text.answers.values import decode_json
from drift_sdk.text.tools import Tool, argument_of

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAGGED_CALL, TAGGED_CALL_END = "<tool_call>", "</tool_call>"
AROUND = (TAGGED_CALL_END, TAGGED_CALL, FUNCTION)
"""Markers between a function and the next."""
KEY = re.compile(r"[^<>\n]*")
ARG_KEY, ARG_KEY_END = "<arg_key>", "</arg_key>"
ARG_VALUE, ARG_VALUE_END = "<arg_value>", "</arg_value>"
LINES_BETWEEN = re.compile(r"</arg_key>(?:\n|\\n)\s*<arg_value>")
"""In templates that write each part of such a call in a line of its own."""


def read_function(calls: CallReader) -> Steps[None]:
    """NAME><parameter=KEY>VALUE</parameter></function>. Values are text, or JSON or Python's literals where
    the tool's schema says that they are not strings."""
    name = yield from calls.name()
    yield from calls.expect(">")
    tool = calls.tools.get(name) or Tool(name, {})
    arguments: dict[str, Any] = {}
    keys: set[str] = set()
    key: str | None = None
    if (yield from calls.expect(PARAMETER, FUNCTION_END)) == PARAMETER:
        key = yield from calls.until(">")
    while key is not None:
        value, following = yield from read_parameter(calls, tool, keys | {key})
        if key in keys:
            raise MalformedCall("a parameter is given twice")

        keys.add(key)
        arguments |= argument_of(tool, key, value.removeprefix("\n").removesuffix("\n"))
        key = following
    calls.add(name, arguments)


def read_parameter(calls: CallReader, tool: Tool, keys: set[str]) -> Steps[tuple[str, str | None]]:
    """Take a value with its end; returns the value and the name of the next parameter, None at the end of the
    function, which is taken too. keys: names of parameters so far, with this one.

    The value may contain </parameter> where no such marker follows, unless it stands in a line of its own and
    the call ends there in another way. Where </parameter> is missing, the value ends before the next
    parameter of the tool or the end of the function, unless the value contains the function. Such an end
    inside of a line must be the end of the answer too, or stand before the next call.
    """
    pieces: list[str] = []
    depth = 0  # functions in the value that are open
    while True:
        text, marker = yield from calls.until_one(
            PARAMETER_END, PARAMETER, FUNCTION, FUNCTION_END, TAGGED_CALL_END
        )
        pieces.append(text)
        is_line = text.endswith("\n")
        behind = ""
        if marker == PARAMETER_END:
            behind = yield from calls.space()
            following = yield from calls.accept(PARAMETER, FUNCTION_END)
            if following is not None:
                return "".join(pieces), (yield from calls.until(">")) if following == PARAMETER else None

            is_own_line = is_line and behind.startswith("\n") and pieces != ["\n"]  # which begins the value
            if is_own_line and (yield from calls.reader.begins(*AROUND)):
                raise MalformedCall("expected <parameter= or </function>")
        elif marker == FUNCTION:
            depth += 1
        elif depth:
            depth -= marker == FUNCTION_END
        elif marker == PARAMETER:
            behind = yield from calls.run(KEY)
            is_next = behind in tool.properties if tool.properties else is_line
            if is_next and behind not in keys and (yield from calls.reader.begins(">")):
                calls.take(1)
                return "".join(pieces), behind
        elif marker == FUNCTION_END:
            behind = yield from calls.space()
            if is_line and (yield from calls.reader.begins(*AROUND)):
                return "".join(pieces), None

            if (yield from calls.accept(TAGGED_CALL_END)):
                behind += TAGGED_CALL_END + (yield from calls.space())
            is_last = not (yield from calls.reader.peek()) and not calls.reader.is_cut
            if is_last or (yield from calls.reader.begins(TAGGED_CALL, FUNCTION)):
                return "".join(pieces), None
        elif is_line:
            behind = yield from calls.space()
            if (yield from calls.reader.begins(TAGGED_CALL)):
                raise MalformedCall("expected </parameter>")
        pieces += [marker, behind]


MAX_ID_CHARS = 64

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, CALL_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class ToolFormat(Struct, frozen=True, kw_only=True):
    """A way to write tool calls.

    openers:    markers that begin a call.
    read:       reads what follows such a marker, which it receives.
    read_start: reads calls without a marker, at the start of the answer; None = there are none.
    markers:    further markers. Like the openers, they are special tokens in the vocabularies of some models.
    """

    openers: tuple[str, ...] = ()
    read: Callable[[CallReader, str], Steps[None]]
    read_start: Callable[[CallReader], Steps[None]] | None = None
    markers: tuple[str, ...] = ()


def read_content(
    calls: CallReader,
    tool_format: ToolFormat | None,
    *,
    is_start: bool = True,
    dropped: tuple[str, ...] = (),
    ends: tuple[str, ...] = (),
) -> Steps[str | None]:
    """Read text and calls, to the end of the answer or to a marker that is taken; returns this marker.

    tool_format: None = everything is text.
    is_start:    whether calls without a marker may stand here.
    dropped:     markers in the text, which are left out.
    ends:        markers that end it.
    """
    markers = dropped + ends
    if tool_format is not None:
        markers += tool_format.openers
        if is_start and tool_format.read_start is not None:
            yield from tool_format.read_start(calls)
    while True:
        marker = yield from calls.reader.take_until(markers, calls.writer.write)
        if marker is None or marker in ends:
            return marker

        if tool_format is not None and marker not in dropped:
            yield from read_call(calls, tool_format, marker)


def read_call(calls: CallReader, tool_format: ToolFormat, marker: str) -> Steps[None]:
    """Read the call behind a marker that was taken, or write it as text."""
    calls.begin(marker)
    try:
        yield from tool_format.read(calls, marker)
    except MalformedCall as error:
        calls.give_back(error)


def read_tagged(calls: CallReader, marker: str) -> Steps[None]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list of such objects."""
    yield from read_objects(calls)
    yield from calls.close("</tool_call>")


def read_granite(calls: CallReader, marker: str) -> Steps[None]:
    """<|tool_call|>[{"name": ..., "arguments": {...}}], or <tool_call> as above."""
    yield from read_tagged(calls, marker)


def read_phi(calls: CallReader, marker: str) -> Steps[None]:
    """<|tool_call|>{...}<|/tool_call|>, or functools[{...}]."""
    yield from read_objects(calls, is_in_list=marker.endswith("["))
    yield from calls.close("<|/tool_call|>")


def read_mistral(calls: CallReader, marker: str) -> Steps[None]:
    """[TOOL_CALLS] and a list of objects, or a name, perhaps [CALL_ID] and an id, [ARGS] and an object."""
    yield from calls.space()
    if (yield from calls.reader.peek()) in ("[", "{"):
        yield from read_objects(calls)
        return

    name = yield from calls.name()
    call_id = None
    yield from calls.space()
    has_marker = (yield from calls.reader.peek()) == "[" and not (yield from calls.follows(marker))
    if has_marker and (yield from calls.expect("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        call_id = (yield from calls.until("[ARGS]")).strip()
    arguments = yield from calls.arguments(marker, may_end=has_marker or name in calls.tools)
    calls.add(name, arguments, checked_id(call_id))


def read_deepseek(calls: CallReader, marker: str) -> Steps[None]:
    """A call between DeepSeek's markers: the word function, the separator, the name and a fenced block of
    JSON (V3, R1), or the name, the separator and JSON (V3.1)."""
    if marker == CALLS_BEGIN:
        yield from calls.expect(CALL_BEGIN)
    name = yield from calls.name()
    yield from calls.expect(CALL_SEP)
    yield from calls.space()
    first = yield from calls.reader.peek()
    is_fenced = False
    if is_name(first):
        second = yield from calls.name()
        yield from calls.space()
        is_fenced = (yield from calls.reader.peek()) == "`"
        if is_fenced:
            yield from calls.expect("```json")
        if is_fenced or second != "null":
            name = second
    ends = ("```",) if is_fenced else (CALL_END, CALLS_END)
    calls.add(name, (yield from calls.arguments(*ends)))
    if is_fenced:
        yield from calls.close("```")
    yield from calls.close(CALL_END)
    yield from calls.close(CALLS_END)


def read_xml(calls: CallReader, marker: str) -> Steps[None]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, or an object in
    <tool_call> as above."""
    if marker == "<tool_call>":
        yield from calls.space()
        if (yield from calls.reader.peek()) == "{":
            yield from read_tagged(calls, marker)
            return

        yield from calls.expect("<function=")
    yield from read_function(calls)
    yield from calls.close("</tool_call>")


def read_glm(calls: CallReader, marker: str) -> Steps[None]:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, or an object in
    <tool_call> as above. Values are text, as of `read_function`."""
    yield from calls.space()
    if (yield from calls.reader.peek()) == "{":
        yield from read_tagged(calls, marker)
        return

    name = yield from calls.name()
    tool = calls.tools.get(name) or Tool(name, {})
    arguments: dict[str, Any] = {}
    keys: set[str] = set()
    while (yield from calls.expect(ARG_KEY, TAGGED_CALL_END)) == ARG_KEY:
        key = (yield from calls.until(ARG_KEY_END)).strip()
        yield from calls.expect(ARG_VALUE)
        value = yield from calls.until(ARG_VALUE_END)
        if key in keys:
            raise MalformedCall("an argument is given twice")

        keys.add(key)
        arguments |= argument_of(tool, key, value)
    calls.add(name, arguments)


def read_bare(calls: CallReader) -> Steps[None]:
    """An answer that begins with calls: {"name": ..., "parameters": {...}}; ... or a list of such objects."""
    separators: tuple[str, ...] = ("<|python_tag|>",)
    try:
        while True:
            calls.begin()
            yield from calls.accept(*separators)
            yield from calls.space()
            first = yield from calls.reader.peek()
            if not first and separators[0] == ";":
                return

            if first not in ("{", "["):
                break

            value = yield from calls.json()
            found = [as_call(each) for each in (value if isinstance(value, list) else [value])]
            if not found or not all(name in calls.tools for name, _, _ in found):
                break

            for each in found:
                calls.add(*each)
            separators = (";", "<|python_tag|>")
    except MalformedCall:
        pass
    calls.give_back()


def read_pythonic(calls: CallReader) -> Steps[None]:
    """An answer that begins with a list of calls as Python has them: [f(a=1), g(b="x")]."""
    calls.begin()
    yield from calls.accept("<|python_start|>", "<|python_tag|>")
    if not (yield from calls.accept("[")):
        calls.give_back()
        return

    try:
        while True:
            name = yield from calls.name()
            if name not in calls.tools:
                break

            calls.add(name, (yield from calls.keywords()))
            if (yield from calls.expect(",", "]")) == "]":
                yield from calls.close("<|python_end|>")
                return
    except MalformedCall:
        pass
    calls.give_back()


def read_nothing(calls: CallReader, marker: str) -> Steps[None]:
    """The reader of formats without markers."""
    raise AssertionError(marker)
    yield


def read_objects(calls: CallReader, *, is_in_list: bool = False) -> Steps[None]:
    """An object that describes a call, or a list of such objects. is_in_list: the list has begun."""
    if not is_in_list and not (yield from calls.accept("[")):
        calls.add(*as_call((yield from calls.json())))
        return

    if (yield from calls.accept("]")):
        calls.begin()
        return

    while True:
        calls.add(*as_call((yield from calls.json())))
        if (yield from calls.expect(",", "]")) == "]":
            calls.begin()
            return


def as_call(value: Any) -> tuple[str, dict[str, Any], str | None]:
    """Name, arguments and id of the call that a JSON value describes. Raises MalformedCall."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise MalformedCall("expected a JSON object with a name")

    arguments = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), None)
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"arguments are not JSON: {error}") from error

    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedCall("expected arguments that are a JSON object")

    return name, arguments, checked_id(value.get("id"))


def checked_id(call_id: object) -> str | None:
    """An id that the model wrote, if it can be one."""
    return call_id if isinstance(call_id, str) and 0 < len(call_id) <= MAX_ID_CHARS else None


TOOL_FORMATS = {
    "json": ToolFormat(openers=("<tool_call>",), read=read_tagged, read_start=read_bare),
    "hermes": ToolFormat(openers=("<tool_call>",), read=read_tagged, markers=("</tool_call>",)),
    "qwen3_coder": ToolFormat(
        openers=("<tool_call>", "<function="), read=read_xml, markers=("</tool_call>",)
    ),
    "glm": ToolFormat(
        openers=("<tool_call>",),
        read=read_glm,
        markers=("</tool_call>", ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END),
    ),
    "llama3_json": ToolFormat(read=read_nothing, read_start=read_bare, markers=("<|python_tag|>",)),
    "pythonic": ToolFormat(
        read=read_nothing,
        read_start=read_pythonic,
        markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
    ),
    "mistral": ToolFormat(openers=("[TOOL_CALLS]",), read=read_mistral, markers=("[CALL_ID]", "[ARGS]")),
    "deepseek": ToolFormat(
        openers=(CALLS_BEGIN, CALL_BEGIN), read=read_deepseek, markers=(CALL_SEP, CALL_END, CALLS_END)
    ),
    "granite": ToolFormat(
        openers=("<|tool_call|>", "<tool_call>"), read=read_granite, markers=("</tool_call>",)
    ),
    "phi4_mini": ToolFormat(
        openers=("<|tool_call|>", "functools["), read=read_phi, markers=("<|/tool_call|>",)
    ),
}
"""Parsers by the name of their format. The format "harmony" has its own parser, for all of an answer."""
