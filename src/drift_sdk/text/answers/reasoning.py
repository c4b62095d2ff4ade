"""The formats in which model families mark their reasoning, its parser, and calls written in reasoning."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from drift_sdk.text.answers.reader import AnswerWriter, Steps, TextReader
from drift_sdk.text.answers.tool_formats import CallReader, ToolFormat, read_call
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


GRANITE_OPENERS = ("Here is my thought process:", "Here's my thought process:")
GRANITE_CLOSERS = ("Here is my response:", "Here's my response:")


class ReasoningFormat(Struct, frozen=True, kw_only=True):
    """A way to mark reasoning.

    openers: markers that begin it, at the start of an answer.
    closers: markers that end it, the first a tag rather than words.
    around:  markers that begin and end the text directly behind reasoning, if it has them; empty = never.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    around: tuple[str, ...] = ()


class Thinking(Struct, frozen=True, kw_only=True):
    """The markers of the reasoning in an answer.

    openers:     those that begin it.
    closers:     those that end it.
    ends:        texts that end it if the model does not, each for the opener at its place. Anywhere: for the
                 first time and for all further ones.
    begun:       an end of the prompt that may have begun it; empty = it has not.
    is_anywhere: it may begin anywhere, more than once; else at the start of the answer.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    ends: tuple[str, ...]
    begun: str
    is_anywhere: bool = False


def read_reasoning(
    reader: TextReader,
    writer: AnswerWriter,
    reasoning_format: ReasoningFormat,
    thought: Thought,
    *,
    is_open: bool,
) -> Steps[bool]:
    """Read the reasoning with which an answer begins; returns whether it does. Calls in it count if the
    answer ends with the reasoning, closed or not, unless it was cut.

    thought: takes the reasoning.
    is_open: the prompt has begun the reasoning.
    """
    space: list[str] = []
    yield from reader.take_space(space.append)
    opener = yield from reader.accept(*reasoning_format.openers)
    if opener is None and not is_open:
        writer.text.write("".join(space))
        return False

    start = reader.num_taken if opener is not None else 0
    closer = yield from reader.take_until(reasoning_format.closers, thought.push)
    writer.reasoning_spans.append((start, reader.num_taken - len(closer or "")))
    thought.end()
    writer.text.cut()
    yield from reader.take_space(space.append)  # white space here is no part of the text
    is_last = not (yield from reader.peek())
    thought.decide(has_calls=is_last and not reader.is_cut)
    return True


def read_around(reader: TextReader, reasoning_format: ReasoningFormat) -> Steps[tuple[str, ...]]:
    """Read what stands between reasoning and text; returns markers in the text which are no part of it."""
    if not reasoning_format.around:
        return ()

    yield from reader.take_space(lambda text: None)  # white space here is no part of the text
    has_begun = yield from reader.accept(reasoning_format.around[0])
    return reasoning_format.around[1:] if has_begun else ()


def is_opened(prompt: str, continued: str | None, reasoning_format: ReasoningFormat) -> bool:
    """Whether the answer to a prompt goes on with reasoning.

    prompt:    ends with a marker if the template begins the reasoning itself.
    continued: the beginning of the answer, if the prompt ends with it. It may contain both markers.
    """
    if continued is None:
        return prompt.rstrip().endswith(reasoning_format.openers)

    last_opener = max(continued.rfind(marker) for marker in reasoning_format.openers)
    return last_opener > max(continued.rfind(marker) for marker in reasoning_format.closers)


REASONING_FORMATS = {
    "think": ReasoningFormat(openers=("<think>",), closers=("</think>",)),
    "mistral": ReasoningFormat(openers=("[THINK]",), closers=("[/THINK]",)),
    "granite": ReasoningFormat(
        openers=("<think>", *GRANITE_OPENERS),
        closers=("</think>", *GRANITE_CLOSERS),
        around=("<response>", "</response>"),
    ),
}
"""Formats of reasoning by name. The format "harmony" has its own parser, for all of an answer."""
