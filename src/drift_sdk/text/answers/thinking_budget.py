"""A limit of the tokens of reasoning: when they are used up, the marker that ends reasoning is the only way
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from drift_sdk.errors import RequestError
from drift_sdk.text.answers.reasoning import Thinking

if TYPE_CHECKING:  # llguidance may not be installed
    from drift_sdk.text.tokenizer import Tokenizer


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

            if state.forced:
                first = state.forced[0]
                rows.view(np.uint32)[index, first // 32] = 1 << first % 32
            else:
                rows[index] = self._all[0]
            state = self._after(state, token_id) if token_id >= 0 else None
        return rows

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move on by newly generated tokens. RequestError for one that the mask did not allow."""
        for token_id in token_ids:
            state = self._after(self._state, token_id)
            if state is None:
                allowed = "a model whose reasoning ends when its tokens are used up"
                raise RequestError.of("thinking_budget", token_id, allowed)

            self._state = state

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
