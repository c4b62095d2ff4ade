"""Tool calls in answers: the formats in which model families write them, and a parser of each.

A call is read when one of its format's opening markers stands in the text, or for some formats at the start
of the answer. What is not in the format stays text, from the place where the call begins that fails; calls
before it are kept. A call is complete where its value closes: a closing marker behind it may be missing.

Names of tools that the model was not given are accepted behind a marker, which shows that a call was meant.
Without a marker, what looks like a call must name a tool that was given: such a model may also answer in JSON
or with a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from drift_sdk.text.answers.reader import Steps, TextReader
from drift_sdk.text.tools import (
    LITERALS,
    MAX_DEPTH,
    Tool,
    ToolSet,
    argument_of,
    decode_json,
    decode_keywords,
)

MAX_NAME_CHARS = 256

NAME = re.compile(r"[\w.:/-]*")
OPENING, CLOSING = "{[(", "}])"


class Syntax(Struct, frozen=True):
    """The notation of a value in brackets.

    first:   brackets that it may begin with.
    opening: brackets inside of it.
    between: run of characters outside of strings that are no brackets.
    strings: characters that begin and end a string, each with the run of characters inside.
    """

    first: str
    opening: str
    between: re.Pattern[str]
    strings: Mapping[str, re.Pattern[str]]


JSON = Syntax(
    "{[",
    "{[",
    re.compile(r"[ \t\r\n0-9:,.+eEtrufalsn-]*"),
    {'"': re.compile(r'[^"\\\x00-\x1f]*')},
)
PYTHON = Syntax(
    "(",
    OPENING,
    re.compile(r"""[^"'{}\[\]()\\]*"""),
    {
        '"': re.compile(r'[^"\\\x00-\x08\x0a-\x1f]*'),
        "'": re.compile(r"[^'\\\x00-\x08\x0a-\x1f]*"),
    },
)


class MalformedCall(ValueError):
    """A call is not in its format."""


class UnfinishedCall(MalformedCall):
    """The text ends inside a call."""


def is_name(text: str) -> bool:
    """Whether `CallReader.name` reads a text as a name."""
    return 0 < len(text) <= MAX_NAME_CHARS and NAME.fullmatch(text) is not None


class CallWriter(Protocol):
    """Takes the calls that are found, and the text around them.

    failure: the error of the first call that could not be read; None if there is none.
    """

    failure: Exception | None

    def write(self, text: str) -> None: ...

    def add_call(self, name: str, arguments: dict[str, Any], call_id: str | None = None) -> None: ...


class CallReader:
    """Reads calls and keeps what it takes, so that a call that fails can be given back as text.

    tools: those that the model was given.

    Its methods raise MalformedCall where the text is not what they expect, and UnfinishedCall at its end.
    """

    def __init__(self, reader: TextReader, writer: CallWriter, tools: ToolSet) -> None:
        self.reader = reader
        self.tools = tools
        self.writer = writer
        self._taken: list[str] = []

    def begin(self, marker: str = "") -> None:
        """Begin a call, with the marker that was taken."""
        self._taken = [marker]

    def add(self, name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> None:
        """Add the call that was read; what follows is another one."""
        self.writer.add_call(name, dict(arguments), call_id)
        self._taken = []

    def give_back(
        self, error: MalformedCall | None = None, write: Callable[[str], None] | None = None
    ) -> None:
        """Write what was taken since the last call as text.

        error: why it is no call; None if no call was meant.
        write: takes the text; None = the writer of the calls.
        """
        if error is not None and self.writer.failure is None:
            self.writer.failure = error
        (write or self.writer.write)("".join(self._taken))
        self._taken = []

    def take(self, num_chars: int) -> str:
        text = self.reader.take(num_chars)
        self._taken.append(text)
        return text

    def space(self) -> Steps[str]:
        """Take white space; returns it."""
        pieces: list[str] = []
        yield from self.reader.take_space(pieces.append)
        self._taken += pieces
        return "".join(pieces)

    def accept(self, *literals: str) -> Steps[str | None]:
        """Take white space and the literal that follows; None if none of them does."""
        yield from self.space()
        found = yield from self.reader.accept(*literals)
        if found is not None:
            self._taken.append(found)
        return found

    def close(self, *markers: str) -> Steps[None]:
        """Take white space and the marker that closes a call that was added, if it is there. At the end of
        the text, a part of it will do."""
        yield from self.space()
        yield from self.reader.accept(*markers, may_end=True)

    def expect(self, *literals: str) -> Steps[str]:
        """Take white space and one of the literals."""
        found = yield from self.accept(*literals)
        if found is None:
            if self.reader.is_ended:
                rest = yield from self.reader.peek(max(map(len, literals)))
                if any(each.startswith(rest) for each in literals):
                    raise UnfinishedCall("the text ends inside a call")

            raise (yield from self.wrong(f"expected {' or '.join(literals)}"))

        return found

    def follows(self, *literals: str) -> Steps[bool]:
        """Whether the text continues with one of the literals, which stays."""
        if (yield from self.reader.begins(*literals)) is not None:
            return True

        if literals and self.reader.is_ended:
            rest = yield from self.reader.peek(max(map(len, literals)))
            if rest and any(each.startswith(rest) for each in literals):
                raise UnfinishedCall("the text ends inside a call")

        return False

    def wrong(self, reason: str) -> Steps[MalformedCall]:
        """The error for the next character not being what is expected."""
        found = yield from self.reader.peek()
        return MalformedCall(reason) if found else UnfinishedCall("the text ends inside a call")

    def header(self, end: str) -> Steps[str | None]:
        """Take the text before the next marker `end`, and the marker; returns the text. At the end of the
        answer None: what was taken is text, unless it has markers."""
        try:
            return (yield from self.until(end))
        except UnfinishedCall:
            if "<|" not in "".join(self._taken):
                self.give_back()
            return None

    def name(self) -> Steps[str]:
        """Take white space and a name: letters, digits and _.:/-"""
        yield from self.space()
        name = yield from self.run(NAME)
        if not is_name(name):
            raise (yield from self.wrong("expected a name"))

        return name

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the longest text that a repeated character class matches; returns it."""
        pieces: list[str] = []
        yield from self.reader.take_run(pattern, pieces.append)
        self._taken += pieces
        return "".join(pieces)

    def until(self, *markers: str) -> Steps[str]:
        """Take the text before the next of these markers, and the marker; returns the text."""
        text, _ = yield from self.until_one(*markers)
        return text

    def until_one(self, *markers: str) -> Steps[tuple[str, str]]:
        """Take the text before the next of these markers, and the marker; returns both."""
        pieces: list[str] = []
        marker = yield from self.reader.take_until(markers, pieces.append)
        self._taken += pieces
        if marker is None:
            raise UnfinishedCall("the text ends inside a call")

        self._taken.append(marker)
        return "".join(pieces), marker

    def json(self) -> Steps[Any]:
        """Take white space and a JSON object or array; returns its value."""
        yield from self.space()
        text = yield from self._balanced(JSON)
        try:
            return decode_json(text)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"not JSON: {error}") from error

    def object(self) -> Steps[dict[str, Any]]:
        """Take white space and a JSON object."""
        value = yield from self.json()
        if not isinstance(value, dict):
            raise MalformedCall("expected a JSON object")

        return value

    def arguments(self, *ends: str, may_end: bool = False) -> Steps[dict[str, Any]]:
        """Take white space and the arguments of a call: a JSON object, or "", null or nothing, which are an
        empty one.

        ends:    markers that may follow at once.
        may_end: whether the answer may end at once, which an answer that was cut does not.
        """
        yield from self.space()
        first = yield from self.reader.peek()
        if first in ("n", '"'):
            yield from self.expect("null", '""')
            return {}

        if (yield from self.follows(*ends)) or (may_end and not first and not self.reader.is_cut):
            return {}

        return (yield from self.object())

    def keywords(self) -> Steps[dict[str, Any]]:
        """Take the arguments of a Python call with its round brackets; returns them by name."""
        text = yield from self._balanced(PYTHON)
        try:
            return decode_keywords(text[1:-1])
        except (ValueError, RecursionError, OverflowError) as error:
            raise MalformedCall(str(error)) from error

    def _balanced(self, syntax: Syntax) -> Steps[str]:
        """Take the text from an opening bracket to the one that closes it."""
        first = yield from self.reader.peek()
        if not first or first not in syntax.first:
            raise (yield from self.wrong("expected a value in brackets"))

        pieces: list[str] = []
        try:
            yield from self._take_balanced(syntax, pieces)
        finally:
            self._taken += pieces
        return "".join(pieces)

    def _take_balanced(self, syntax: Syntax, pieces: list[str]) -> Steps[None]:
        closings: list[str] = []
        quote = ""
        while True:
            run = syntax.strings[quote] if quote else syntax.between
            yield from self.reader.take_run(run, pieces.append)
            char = yield from self.reader.peek()
            if not char:
                raise UnfinishedCall("the text ends inside a call")

            num_chars = 1
            if quote:
                if char == "\\":
                    num_chars = len((yield from self.reader.peek(2)))
                elif char == quote:
                    quote = ""
                else:
                    raise MalformedCall("a control character in a string")
            elif char in syntax.strings:
                quote = char
            elif char in syntax.opening and len(closings) < MAX_DEPTH:
                closings.append(CLOSING[OPENING.index(char)])
            elif closings[-1:] == [char]:
                closings.pop()
            else:
                raise MalformedCall("a character or bracket that may not be there, or nested too deeply")

            pieces.append(self.reader.take(num_chars))
            if not closings:
                return


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


NOTED_CALL, NOTED_CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
"""The markers of Gemma 4's calls, and the one around its strings."""
NOTED_KEY = re.compile(r"[^<>{}\[\],:\"\n]*")
WORD = re.compile(r"[\w.+-]*")


def noted(value: object) -> str:
    """A JSON value in Gemma 4's notation: strings stand between two `QUOTE` as they are, keys stand without
    quotes and in alphabetical order."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"

    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{noted(value[key])}' for key in noted_order(value))}}}"

    if isinstance(value, list | tuple):
        return f"[{','.join(map(noted, value))}]"

    return json.dumps(value, allow_nan=False)


def noted_order(keys: Iterable[Any]) -> list[Any]:
    """Keys in the order in which Gemma 4's template writes them."""
    return sorted(keys, key=lambda key: str(key).lower())


def read_gemma4(calls: CallReader, marker: str) -> Steps[None]:
    """<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, with values as `noted` writes them."""
    yield from calls.expect("call:")
    name = yield from calls.name()
    yield from calls.expect("{")
    calls.add(name, (yield from read_noted_object(calls, 1)))
    yield from calls.close(NOTED_CALL_END)


def read_noted(calls: CallReader, depth: int) -> Steps[Any]:
    """Take a value in Gemma 4's notation. depth: number of brackets around it."""
    opening = yield from calls.accept(QUOTE, "{", "[")
    if opening == QUOTE:
        return (yield from calls.until(QUOTE))

    if opening is None:
        return (yield from read_word(calls))

    if depth >= MAX_DEPTH:
        raise MalformedCall("nested too deeply")

    if opening == "{":
        return (yield from read_noted_object(calls, depth + 1))

    items: list[Any] = []
    if (yield from calls.accept("]")):
        return items

    while True:
        items.append((yield from read_noted(calls, depth + 1)))
        if (yield from calls.expect(",", "]")) == "]":
            return items


def read_noted_object(calls: CallReader, depth: int) -> Steps[dict[str, Any]]:
    """Take an object in Gemma 4's notation, behind its opening bracket. depth: number of brackets around its
    values."""
    found: dict[str, Any] = {}
    if (yield from calls.accept("}")):
        return found

    while True:
        if (yield from calls.accept(QUOTE)):
            key = yield from calls.until(QUOTE)
        else:
            key = (yield from calls.run(NOTED_KEY)).strip()
            if not key:
                yield from calls.follows(QUOTE)
                raise (yield from calls.wrong("expected a key"))

        yield from calls.expect(":")
        if key in found:
            raise MalformedCall("an object has a key twice")

        found[key] = yield from read_noted(calls, depth)
        if (yield from calls.expect(",", "}")) == "}":
            return found


def read_word(calls: CallReader) -> Steps[Any]:
    """Take a number, true, false or null. Python's names of these, which some templates write, are read
    too."""
    word = yield from calls.run(WORD)
    if word in LITERALS:
        return LITERALS[word]

    if word:
        try:
            return decode_json(word)
        except ValueError as error:
            raise (yield from calls.wrong("expected a value")) from error

    yield from calls.follows(QUOTE)
    raise (yield from calls.wrong("expected a value"))


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
    "gemma4": ToolFormat(openers=(NOTED_CALL,), read=read_gemma4, markers=(NOTED_CALL_END, QUOTE)),
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
