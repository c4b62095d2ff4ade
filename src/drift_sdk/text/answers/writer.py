"""Collects what a parser of answers finds: reasoning, text and tool calls."""

from __future__ import annotations

import secrets
import string
from typing import Any

from msgspec import Struct

from drift_sdk.results import ToolCall

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
