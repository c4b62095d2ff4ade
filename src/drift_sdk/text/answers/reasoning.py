"""Reasoning in answers: the formats in which model families mark it, its parser, and a limit of its tokens.

When a budget is used up, the marker that ends reasoning is the only way on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from drift_sdk.errors import RequestError
from drift_sdk.text.answers.reader import AnswerWriter, Steps, TextReader
from drift_sdk.text.answers.tool_formats import CallReader, ToolFormat, read_call
from drift_sdk.text.tools import ToolSet

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer


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
    token:   the marker with which the only opener begins; empty = openers are markers as a whole.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    around: tuple[str, ...] = ()
    token: str = ""


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
        return prompt.rstrip().endswith(tuple(map(str.rstrip, reasoning_format.openers)))

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
    "gemma4": ReasoningFormat(openers=("<|channel>thought\n",), closers=("<channel|>",), token="<|channel>"),
}
"""Formats of reasoning by name. The format "harmony" has its own parser, for all of an answer."""


Masks = NDArray[np.int32]


class State(Struct, frozen=True):
    """A place in an answer.

    place:    "ahead" of reasoning, "inside" of it, or "behind" it, where none may follow.
    text:     the end of the text, in which a marker may have begun.
    num_left: tokens of reasoning that are left.
    opener:   number of the marker that has begun the reasoning.
    num_ends: how often reasoning has been ended for the model.
    forced:   tokens that must come next.
    """

    place: Literal["ahead", "inside", "behind"]
    text: bytes
    num_left: int
    opener: int = 0
    num_ends: int = 0
    forced: tuple[int, ...] = ()


class ThinkingBudget:
    """Permits every token until `num_tokens` tokens of reasoning have been generated, then those of the
    marker that ends it, and every token afterwards. Implements `TokenConstraint`; threads take turns as with
    a `GrammarConstraint`.

    thinking:   the markers. RequestError if the tokenizer cannot write them.
    marker_ids: special tokens that are part of the text.
    """

    is_slow = False

    def __init__(
        self,
        thinking: Thinking,
        num_tokens: int,
        tokenizer: Tokenizer,
        *,
        marker_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._bytes_of: Mapping[int, bytes] = tokenizer.shown_bytes(marker_ids)
        self._openers = [opener.encode() for opener in thinking.openers]
        self._closers = [closer.encode() for closer in thinking.closers]
        self._most_bytes = max(map(len, (*self._openers, *self._closers))) - 1
        self._end_ids = {end: self._ids_of(end, num_tokens, vocab_size) for end in thinking.ends}
        self._all: Masks = np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32)
        self._all.view(np.uint32)[0, -1] >>= -vocab_size % 32
        self._state = self._look_ahead(State("ahead", b"", num_tokens), thinking.begun.encode())

    def masks(self, draft_token_ids: Sequence[int]) -> Masks:
        """Masks for the next token and after each drafted token, see `TokenConstraint`. Rows after a drafted
        token that is not allowed are zero."""
        rows = np.zeros((len(draft_token_ids) + 1, self._all.shape[1]), dtype=np.int32)
        state: State | None = self._state
        for index, token_id in enumerate((*draft_token_ids, -1)):
            if state is None:
                break

            rows[index] = self._row(state.forced)
            state = self._after(state, token_id) if token_id >= 0 else None
        return rows

    def mask_ahead(self) -> Masks | None:
        """See `TokenConstraint`. The next token alone decides only where it may be the last one of the
        budget."""
        state: State | None = self._state
        assert state is not None
        if state.forced:
            state = self._after(state, state.forced[0])
            return self._row(state.forced) if state is not None else None

        least = {"ahead": 1, "inside": 2, "behind": state.num_left}[state.place]
        return self._row(()) if state.num_left >= least else None

    @property
    def can_advance_at_once(self) -> bool:
        """See `Limits`."""
        return True

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move on by newly generated tokens. RequestError for one that the mask did not allow."""
        for token_id in token_ids:
            state = self._after(self._state, token_id)
            if state is None:
                allowed = "the marker that ends reasoning, which nothing else of the request forbids"
                message = f"thinking_budget: token {token_id} when it is used up: expected {allowed}"
                raise RequestError(message, field="thinking_budget", value=token_id, allowed=allowed)

            self._state = state

    def _row(self, forced: tuple[int, ...]) -> Masks:
        """The mask of the first of these tokens, or of all tokens if there is none."""
        row: Masks = self._all[0]
        if forced:
            row = np.zeros_like(row)
            row.view(np.uint32)[forced[0] // 32] = 1 << forced[0] % 32
        return row

    def _after(self, state: State, token_id: int) -> State | None:
        """The state after a token; None if it is not allowed."""
        if state.forced:
            if token_id != state.forced[0]:
                return None

            forced = state.forced[1:]
            return replace(state, forced=forced) if forced else self._closed(state)

        if state.place == "behind":
            return state

        text = state.text + self._bytes_of[token_id]
        if state.place == "ahead":
            return self._look_ahead(state, text)

        return self._look_inside(state, text, num_used=1)

    def _look_ahead(self, state: State, text: bytes) -> State:
        is_anywhere = self._thinking.is_anywhere
        text = text if is_anywhere else text.lstrip()
        for number, opener in enumerate(self._openers):
            before, found, rest = text.partition(opener)
            if found and (is_anywhere or not before):
                return self._look_inside(replace(state, place="inside", opener=number), rest)

        if is_anywhere or any(opener.startswith(text) for opener in self._openers):
            return replace(state, text=text[-self._most_bytes :])

        return replace(state, place="behind")

    def _look_inside(self, state: State, text: bytes, *, num_used: int = 0) -> State:
        if any(closer in text for closer in self._closers):
            return self._closed(state)

        num_left = state.num_left - num_used
        if num_left > 0:
            return replace(state, num_left=num_left, text=text[-self._most_bytes :])

        ends = self._thinking.ends
        end = ends[min(state.num_ends if self._thinking.is_anywhere else state.opener, len(ends) - 1)]
        forced = self._rest_of(end, text)
        return replace(state, num_left=num_left, num_ends=state.num_ends + 1, forced=forced)

    def _closed(self, state: State) -> State:
        place: Literal["ahead", "behind"] = "ahead" if self._thinking.is_anywhere else "behind"
        return replace(state, place=place, text=b"", forced=())

    def _rest_of(self, end: str, text: bytes) -> tuple[int, ...]:
        """The tokens of a marker, or the last ones if the text ends with its beginning."""
        ids = self._end_ids[end]
        for num_begun in range(len(end) - 1, 0, -1) if len(ids) > 1 else ():
            if text.endswith(end[:num_begun].encode()):
                rest = tuple(self._tokenizer.encode(end[num_begun:], add_special_tokens=False))
                return rest if self._text_of(rest) == end[num_begun:].encode() else ids

        return ids

    def _ids_of(self, end: str, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
        ids = tuple(self._tokenizer.encode(end, add_special_tokens=False))
        if self._text_of(ids).strip() != end.encode() or max(ids) >= vocab_size:
            raise RequestError.of("thinking_budget", num_tokens, f"None: the model has no tokens for {end!r}")

        return ids

    def _text_of(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes_of.__getitem__, ids))
