"""The formats in which model families mark their reasoning, and its parser."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk.text.answers.reader import Steps, TextReader
from drift_sdk.text.answers.thought import Thought
from drift_sdk.text.answers.writer import AnswerWriter

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
