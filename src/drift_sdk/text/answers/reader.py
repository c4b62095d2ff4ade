"""Text that arrives in pieces: parsers that are generators, a writer of what they find, and stop strings.

A parser is written as if the whole text were there. Where it needs more text, it yields, and it is resumed
with the next piece. All positions are decided by characters alone, never by the borders of pieces, so the
result does not depend on how the text is cut. Reading takes time linear in the length of the text: text that
has been looked at is taken out, apart from the beginning of a marker.
"""

from __future__ import annotations

import re
import secrets
import string
from collections import deque
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, TypeVar

from msgspec import Struct

from drift_sdk.results import ToolCall

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A parser: it yields where it waits for more text, and returns its result."""

SPACE = re.compile(r"\s*")


class TextReader:
    """The text that has arrived and has not been taken.

    is_ended: whether no more text arrives.
    is_cut:   whether the text ended early, before its writer was done.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._num_before = 0  # characters taken before those of _text
        self.is_ended = False
        self.is_cut = False

    @property
    def num_taken(self) -> int:
        """Number of characters taken."""
        return self._num_before + self._position

    def push(self, text: str) -> None:
        """Add text."""
        self._num_before += self._position
        self._text = self._text[self._position :] + text
        self._position = 0

    def wait(self) -> Steps[bool]:
        """Wait for more text; returns whether it has come, False at the end."""
        if self.is_ended:
            return False

        yield
        return not self.is_ended

    def peek(self, num_chars: int = 1) -> Steps[str]:
        """The next characters, which stay; fewer than `num_chars` only at the end."""
        while len(self._text) - self._position < num_chars and (yield from self.wait()):
            pass
        return self._text[self._position : self._position + num_chars]

    def take(self, num_chars: int) -> str:
        """Take characters that have been peeked at."""
        start = self._position
        self._position = min(start + num_chars, len(self._text))
        return self._text[start : self._position]

    def take_space(self, write: Callable[[str], None]) -> Steps[None]:
        """Take white space, handing it to `write`."""
        yield from self.take_run(SPACE, write)

    def take_run(self, run: re.Pattern[str], write: Callable[[str], None]) -> Steps[None]:
        """Take the longest text that a pattern matches, handing it to `write` piece by piece. The pattern
        must be a repeated character class: it matches at every position, perhaps nothing."""
        while True:
            match = run.match(self._text, self._position)
            assert match is not None
            if match.end() > self._position:
                self._position = match.end()
                write(match[0])
            if self._position < len(self._text) or not (yield from self.wait()):
                return

    def begins(self, *literals: str) -> Steps[str | None]:
        """The first of these literals that the text continues with, which stays; None if there is none."""
        candidates = literals
        num_chars = 0
        while candidates:
            num_chars += 1
            found = yield from self.peek(num_chars)
            candidates = tuple(each for each in candidates if each.startswith(found))
            if found in candidates:
                return found

            if len(found) < num_chars:
                return None

        return None

    def accept(self, *literals: str, may_end: bool = False) -> Steps[str | None]:
        """Take the first of these literals that the text continues with; None, and nothing is taken, if there
        is none. may_end: at the end of the text, the beginning of a literal is taken too."""
        found = yield from self.begins(*literals)
        if found is None and may_end and self.is_ended:
            rest = yield from self.peek(max(map(len, literals)))
            found = rest if any(each.startswith(rest) for each in literals) else None
        return None if found is None else self.take(len(found))

    def take_until(self, markers: tuple[str, ...], write: Callable[[str], None]) -> Steps[str | None]:
        """Hand the text before the next marker to `write` and take the marker; returns it, or None at the end
        of the text. No marker may be the beginning of another."""
        search = searcher(markers)
        while True:
            text, start = self._text, self._position
            match = search.search(text, start) if markers else None
            if match is not None:
                self._position = match.end()
                if match.start() > start:
                    write(text[start : match.start()])
                return match[0]

            end = len(text) - (0 if self.is_ended else num_begun(text, start, markers))
            if end > start:
                self._position = end
                write(text[start:end])
            if not (yield from self.wait()) and self._position == len(self._text):
                return None


@lru_cache(256)
def searcher(markers: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds the first of some markers."""
    return re.compile("|".join(map(re.escape, markers)))


def num_begun(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Length of the longest end of a text, from `start` on, that a marker begins with."""
    longest = min(max(map(len, markers), default=1) - 1, len(text) - start)
    for num_chars in range(longest, 0, -1):
        first = text[-num_chars]
        for marker in markers:
            if marker[0] == first and marker.startswith(text[-num_chars:]):
                return num_chars

    return 0


ID_CHARS = string.ascii_letters + string.digits
NUM_ID_CHARS = 9
"""Mistral's templates take ids of exactly nine letters and digits; others take any."""


class Split(Struct, frozen=True, kw_only=True, gc=False):
    """The parts that a piece of an answer adds. Any of the fields may be empty."""

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Split) -> Split:
        return Split(
            reasoning=self.reasoning + other.reasoning,
            text=self.text + other.text,
            tool_calls=self.tool_calls + other.tool_calls,
        )


def new_call_id() -> str:
    """A random id of a tool call."""
    return "".join(secrets.choice(ID_CHARS) for _ in range(NUM_ID_CHARS))


class AnswerWriter:
    """The parts of an answer as they are found.

    White space between a part and the next (after reasoning, around tool calls) belongs to no part: text and
    reasoning neither begin nor end with it there. Between two texts around a call, that before the call
    stays, or a newline if there is none.

    failure:         the error of the first call that could not be read; None if there is none.
    reasoning_spans: where the reasoning is in the answer, with its white space and without its markers:
                     places of its first character and behind its last one, noted when it ends.
    """

    def __init__(self) -> None:
        self.reasoning_spans: list[tuple[int, int]] = []
        self.text: SpacedText = SpacedText()
        self.reasoning: SpacedText = SpacedText()
        self.reasoning.cut()
        self.failure: Exception | None = None
        self._calls: list[ToolCall] = []
        self._num_calls = 0

    def add_call(self, name: str, arguments: dict[str, Any], call_id: str | None = None) -> None:
        """Add a call. call_id: the id that the model wrote; None if it wrote none."""
        self.text.cut()
        call = ToolCall(id=call_id or new_call_id(), index=self._num_calls, name=name, arguments=arguments)
        self._calls.append(call)
        self._num_calls += 1

    def write(self, text: str) -> None:
        """Add text."""
        self.text.write(text)

    def take(self) -> Split:
        """The parts added since the last call."""
        calls, self._calls = self._calls, []
        return Split(reasoning=self.reasoning.take(), text=self.text.take(), tool_calls=tuple(calls))

    def end(self) -> None:
        """End the answer: white space at the end of a text is written."""
        self.reasoning.cut()
        self.text.end()


class SpacedText:
    """A text without the white space at its cuts."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._space: list[str] = []  # at the end, held back
        self._is_cut = False
        self._is_empty = True

    def write(self, text: str) -> None:
        """Add text."""
        if self._is_cut:
            text = text.lstrip()
            if not text:
                return

            self._is_cut = False
            if self._is_empty:
                self._space.clear()
            elif not self._space:
                self._space.append("\n")

        body = text.rstrip()
        if body:
            self._pieces += [*self._space, body]
            self._space.clear()
            self._is_empty = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def cut(self) -> None:
        """End a part of the text: white space here is not written, except before more text."""
        self._is_cut = True

    def end(self) -> None:
        if not self._is_cut:
            self._pieces += self._space
            self._space.clear()

    def take(self) -> str:
        """The text that was added since the last call and is not held back."""
        if not self._pieces:
            return ""

        text = "".join(self._pieces)
        self._pieces.clear()
        return text


class StopMatcher:
    """Searches a growing text for stop strings and holds back only text that may be the start of one.

    stops:         the stop strings, none of them empty.
    include_stop:  whether the emitted text includes the stop string that ended it.

    The text ends as soon as any stop string is complete: of all occurrences, the one that ends first wins,
    and of those that end together, the longest. With the stops "b" and "abc", the text "abc" ends at its "b".
    This can be decided while text arrives, so the result does not depend on how the text is cut into pieces.

    Matching walks an Aho-Corasick automaton (Aho and Corasick 1975). Its state is the longest suffix of the
    text that is a prefix of some stop string, which is also exactly the text to hold back. Time is linear in
    the length of the text; the text held back is shorter than the longest stop string.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._root = _build_automaton(stops)
        self._include_stop = include_stop
        self._state = self._root
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns the text to emit now, and the stop string that ended the text or None.

        The emitted text excludes the stop string, or ends with it if `include_stop`. After a match, nothing
        more is emitted and the same stop string is returned.
        """
        if self._matched is not None:
            return "", self._matched

        before = self._state
        state = before
        for index, char in enumerate(text):
            while char not in state.children and state.fallback is not None:
                state = state.fallback

            state = state.children.get(char, state)
            if state.match is not None:
                return self._end(before, text[: index + 1], state.match), state.match

        self._state = state
        return _emit(before, text, num_held=state.depth), None

    def flush(self) -> str:
        """End the text; returns the text that was held back."""
        held = self._state.prefix()
        self._state = self._root
        return held

    def _end(self, before: _State, text: str, match: str) -> str:
        self._matched = match
        self._state = self._root
        return _emit(before, text, num_held=0 if self._include_stop else len(match))


class _State:
    """A state of the automaton: a prefix of a stop string, the first `depth` characters of `stop`.

    children:  next character -> state.
    fallback:  the longest proper suffix of the prefix that is also a prefix of a stop string; None for the
               root.
    match:     the longest stop string that the prefix ends with; None if there is none.
    """

    __slots__ = ("children", "depth", "fallback", "match", "stop")

    def __init__(self, stop: str, depth: int) -> None:
        self.stop = stop
        self.depth = depth
        self.children: dict[str, _State] = {}
        self.fallback: _State | None = None
        self.match: str | None = None

    def prefix(self) -> str:
        return self.stop[: self.depth]


def _build_automaton(stops: tuple[str, ...]) -> _State:
    root = _State("", 0)
    for stop in stops:
        state = root
        for depth, char in enumerate(stop, start=1):
            state = state.children.setdefault(char, _State(stop, depth))

        state.match = stop

    # Breadth first: a fallback is computed from the fallbacks of shorter prefixes.
    states = deque([root])
    while states:
        parent = states.popleft()
        for char, state in parent.children.items():
            state.fallback = _find_fallback(parent, char, root)
            state.match = state.match or state.fallback.match
            states.append(state)

    return root


def _find_fallback(parent: _State, char: str, root: _State) -> _State:
    candidate = parent.fallback
    while candidate is not None and char not in candidate.children:
        candidate = candidate.fallback

    return root if candidate is None else candidate.children[char]


def _emit(before: _State, text: str, *, num_held: int) -> str:
    """The text held back in state `before`, followed by `text`, without the last `num_held` characters."""
    num_emitted = before.depth + len(text) - num_held
    if num_emitted <= before.depth:
        return before.stop[:num_emitted]

    return before.prefix() + text[: num_emitted - before.depth]
