"""Reading one tool call out of an answer, with a way back to plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from drift_sdk.text.answers.reader import Steps, TextReader
from drift_sdk.text.answers.values import MAX_DEPTH, decode_json, decode_keywords
from drift_sdk.text.tools import ToolSet

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
