"""Splits the answer of a model into reasoning, text and tool calls while it is generated."""

from __future__ import annotations

from drift_sdk.text.answers.calls import UnfinishedCall
from drift_sdk.text.answers.reader import Steps, TextReader
from drift_sdk.text.answers.writer import AnswerWriter, Split


class AnswerSplitter:
    """The parts of one answer, as it arrives.

    read:   parses the answer; it has not begun.
    reader: where it reads.
    writer: where it writes.

    Joined over all pushes and the flush, the parts do not depend on how the answer is cut into pieces. A
    call is returned by the push in which it closes, a call in reasoning by the flush. Text is held back only
    while it may be the beginning of a marker or white space before one, and inside a call, until it closes or
    turns out not to be a call; reasoning behind a call, until the reasoning closes.
    """

    def __init__(self, read: Steps[None], reader: TextReader, writer: AnswerWriter) -> None:
        self._read = read
        self._reader = reader
        self._writer = writer
        next(read)  # to the place where it waits for text

    def push(self, text: str) -> Split:
        """Add text; returns the parts that it completes."""
        self._reader.push(text)
        next(self._read)
        return self._writer.take()

    def flush(self, *, is_cut: bool = False) -> Split:
        """End the answer; returns the parts that were held back. A call that has not closed is text.

        is_cut: whether the answer ended early, before the model ended it.
        """
        self._reader.is_ended = True
        self._reader.is_cut = is_cut
        next(self._read, None)
        self._writer.end()
        return self._writer.take()

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """Where the reasoning is in the answer, see `AnswerWriter`; complete after the flush."""
        return self._writer.reasoning_spans

    @property
    def failure(self) -> Exception | None:
        """Why the first malformed call could not be read; None if there is none."""
        return self._writer.failure

    @property
    def is_unfinished(self) -> bool:
        """Whether the failure is that the answer ends inside a call."""
        return isinstance(self.failure, UnfinishedCall)
