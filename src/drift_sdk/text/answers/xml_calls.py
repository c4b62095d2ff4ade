"""Calls whose arguments are written as text between tags, as Qwen3-Coder writes them."""

from __future__ import annotations

import re
from typing import Any

from drift_sdk.text.answers.calls import CallReader, MalformedCall
from drift_sdk.text.answers.reader import Steps
from drift_sdk.text.tools import Tool, argument_of

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
AROUND = (CALL_END, CALL, FUNCTION)
"""Markers between a function and the next."""
KEY = re.compile(r"[^<>\n]*")


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
        text, marker = yield from calls.until_one(PARAMETER_END, PARAMETER, FUNCTION, FUNCTION_END, CALL_END)
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

            if (yield from calls.accept(CALL_END)):
                behind += CALL_END + (yield from calls.space())
            is_last = not (yield from calls.reader.peek()) and not calls.reader.is_cut
            if is_last or (yield from calls.reader.begins(CALL, FUNCTION)):
                return "".join(pieces), None
        elif is_line:
            behind = yield from calls.space()
            if (yield from calls.reader.begins(CALL)):
                raise MalformedCall("expected </parameter>")
        pieces += [marker, behind]
