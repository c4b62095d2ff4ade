"""Reasoning, and the calls that a model writes in it."""

from __future__ import annotations

from typing import Any

from drift_sdk.text.answers.calls import CallReader
from drift_sdk.text.answers.reader import Steps, TextReader
from drift_sdk.text.answers.tool_formats import ToolFormat, read_call
from drift_sdk.text.answers.writer import AnswerWriter
from drift_sdk.text.tools import ToolSet


class Thought:
    """The reasoning of an answer, as it arrives.

    A model may call a tool and end its answer without closing its reasoning, or think about a call that it
    does not make. Which of them a call is shows only where the reasoning ends: from the first whole call on,
    reasoning is held back until then.

    writer:      takes reasoning and calls.
    tools:       those that the model was given.
    tool_format: None = calls are not looked for.
    """

    def __init__(self, writer: AnswerWriter, tools: ToolSet, tool_format: ToolFormat | None) -> None:
        self.failure: Exception | None = None
        self._writer = writer
        self._reader = TextReader()
        self._steps: Steps[None] | None = None
        self._raw: list[str] = []  # all of the reasoning
        self._start = 0  # where the call that is read begins in it, or the first whole call
        self._held: list[str | tuple[str, dict[str, Any], str | None]] = []  # from the first call on
        if tool_format is not None:
            self._steps = self._read(CallReader(self._reader, self, tools), tool_format)
            next(self._steps)

    def push(self, text: str) -> None:
        """Add reasoning."""
        if self._steps is None:
            self._writer.reasoning.write(text)
            return

        self._raw.append(text)
        self._reader.push(text)
        next(self._steps)

    def end(self) -> None:
        """End the reasoning. `decide` says whether its calls count."""
        self._reader.is_ended = True
        if self._steps is not None:
            next(self._steps, None)

    def decide(self, *, has_calls: bool) -> None:
        """Write what is held back. has_calls: whether calls in the reasoning count."""
        if not has_calls:
            if self._held:
                self._writer.reasoning.write("".join(self._raw)[self._start :])
            return

        self._writer.failure = self.failure
        for part in self._held:
            if isinstance(part, str):
                self._writer.reasoning.write(part)
            else:
                self._writer.reasoning.cut()
                self._writer.add_call(*part)

    def write(self, text: str) -> None:
        """Take text that is part of no call."""
        if self._held:
            self._held.append(text)
        else:
            self._writer.reasoning.write(text)

    def add_call(self, name: str, arguments: dict[str, Any], call_id: str | None = None) -> None:
        """Take a call."""
        self._held.append((name, arguments, call_id))

    def _read(self, calls: CallReader, tool_format: ToolFormat) -> Steps[None]:
        """Read the reasoning to its end. Calls without a marker are looked for at the start of each line."""
        read_start = tool_format.read_start
        markers = tool_format.openers if read_start is None else ("\n", *tool_format.openers)
        marker: str | None = "\n"
        while marker is not None:
            if marker != "\n":
                self._mark(len(marker))
                yield from read_call(calls, tool_format, marker)
            elif read_start is not None:
                self._mark(0)
                yield from read_start(calls)
            marker = yield from self._reader.take_until(markers, self.write)
            if marker == "\n":
                self.write(marker)

    def _mark(self, num_chars: int) -> None:
        """Note that a call may begin so many characters before the place that is read."""
        if not self._held:
            self._start = self._reader.num_taken - num_chars
