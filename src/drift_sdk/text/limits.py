"""Limits of a request's tokens: its grammar, its token machines and its thinking budget, also together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from drift_sdk.errors import RequestError
from drift_sdk.processors import TokenMachine, TokenState, machines_of
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.text.answers.reasoning import ThinkingBudget

if TYPE_CHECKING:
    from drift_sdk.text.answers.answer import Answer
    from drift_sdk.text.tokenizer import Tokenizer

Masks = NDArray[np.int32]


class Limits(Protocol):
    """A constraint that follows the tokens of its request, see `TokenConstraint`."""

    @property
    def is_slow(self) -> bool: ...

    def masks(self, draft_token_ids: Sequence[int]) -> Masks: ...

    def mask_ahead(self) -> Masks | None: ...

    @property
    def can_advance_at_once(self) -> bool:
        """Whether `advance` takes so little time that the engine's thread may call it. Only then does
        `mask_ahead` ever have a mask."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move on by newly generated tokens. RequestError if they are not allowed."""


def limits_of(
    params: SamplingParams,
    answer: Answer | None,
    grammar: Limits | None,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> Limits | None:
    """The limits of a request's tokens; None without any. answer: None = the prompt is no conversation.
    RequestError for a budget that cannot be kept."""
    budget = budget_of(params, answer, tokenizer, vocab_size)
    machines = (MachineLimits(machine, vocab_size) for machine in machines_of(params.logits_processors))
    parts = [part for part in (grammar, budget, *machines) if part is not None]
    return AllLimits(parts) if len(parts) > 1 else next(iter(parts), None)


def budget_of(
    params: SamplingParams, answer: Answer | None, tokenizer: Tokenizer, vocab_size: int
) -> ThinkingBudget | None:
    """The thinking budget of a request, if it limits anything. RequestError for one that cannot be kept."""
    num_tokens = params.thinking_budget
    if num_tokens is None:
        return None

    if answer is None:
        allowed = "None for a prompt that is no conversation: only chat() tells reasoning from text"
        raise RequestError.of("thinking_budget", num_tokens, allowed)

    if answer.thinking is None or (params.max_tokens is not None and num_tokens >= params.max_tokens):
        return None

    if not tokenizer.has_token_bytes:
        allowed = "None: the text of a token depends on its neighbours"
        raise RequestError.of("thinking_budget", num_tokens, allowed)

    return ThinkingBudget(
        answer.thinking, num_tokens, tokenizer, marker_ids=answer.marker_ids, vocab_size=vocab_size
    )


def check_last(limits: Limits, token_ids: Sequence[int]) -> None:
    """RequestError if one of the tokens that end a text was not allowed: where machines leave none, a token
    is generated all the same, perhaps one that ends texts. limits: before these tokens."""
    for row, token_id in zip(limits.masks(token_ids[:-1]), token_ids, strict=True):
        if not is_allowed(row, token_id):
            raise without_choice(token_id)


def is_allowed(row: Masks, token_id: int) -> bool:
    return bool(row[token_id // 32] >> token_id % 32 & 1)


def without_choice(token_id: int) -> RequestError:
    allowed = "machines that leave a token everywhere, also with the grammar and the thinking budget"
    message = f"logits_processors: they forbid the next token, {token_id}: expected {allowed}"
    return RequestError(message, field="logits_processors", value=token_id, allowed=allowed)


MANY_IDS = 1_000
"""A state that names more token ids takes longer than the engine's thread may: a millisecond or more."""
MAX_PREPARED_IDS = 2**20
"""Most token ids of such states of a machine that are prepared with the request."""
MAX_ROW_BYTES = 32 * 2**20
"""Most bytes of masks that are kept for a machine, an eighth of them made with the request."""


def kinds_of(states: Sequence[TokenState]) -> list[int]:
    """For each state, the number of the first one that allows the same tokens."""
    by_object: dict[int, int] = {}
    by_value: dict[tuple[tuple[int, ...] | None, tuple[int, ...]], int] = {}
    kinds: list[int] = []
    for number, state in enumerate(states):
        kind = by_object.get(id(state))
        if kind is None:
            kind = by_object[id(state)] = by_value.setdefault((state.allowed, state.forbidden), number)
        kinds.append(kind)
    return kinds


def num_ids(state: TokenState) -> int:
    """Token ids that a state names."""
    return len(state.allowed or ()) + len(state.forbidden) + len(state.next)


class MachineLimits:
    """The tokens that a `TokenMachine` allows. Implements `TokenConstraint`; the masks of its states are made
    when they are first needed.

    A machine is quick if the engine's thread may follow it: states that name many ids are few enough to be
    prepared here, on a text thread.
    """

    is_slow = False

    def __init__(self, machine: TokenMachine, vocab_size: int) -> None:
        self._states = machine.states
        self._num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._number = 0  # of the state
        self._kinds = kinds_of(machine.states)
        self._kept: dict[int, Masks] = {}  # of states that name many ids, by kind
        self._rows: dict[int, Masks] = {}  # of the others
        self._next_kinds: dict[int, int | None] = {}  # by state, see `_next_kind`
        large = [number for number, state in enumerate(self._states) if num_ids(state) > MANY_IDS]
        large_ids = sum(num_ids(self._states[number]) for number in large)
        self._max_rows = max(8, MAX_ROW_BYTES // (4 * self._num_words))
        num_kept = len({self._kinds[number] for number in large})
        self._is_quick = large_ids <= MAX_PREPARED_IDS and num_kept <= self._max_rows // 8
        for number in large if self._is_quick else ():
            kind = self._kinds[number]
            if kind not in self._kept:
                self._kept[kind] = self._made(self._states[kind])
            self._next_kind(number)
        self._row(0)

    def masks(self, draft_token_ids: Sequence[int]) -> Masks:
        """See `TokenConstraint`."""
        number = self._number
        rows = [self._row(number)]
        for token_id in draft_token_ids:
            number = self._states[number].after(token_id, number)
            rows.append(self._row(number))
        return np.stack(rows)

    def mask_ahead(self) -> Masks | None:
        """See `TokenConstraint`."""
        kind = self._next_kind(self._number) if self._is_quick else None
        return None if kind is None else self._row(kind)

    @property
    def can_advance_at_once(self) -> bool:
        """See `Limits`."""
        return self._is_quick

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Limits`."""
        for token_id in token_ids:
            if not is_allowed(self._row(self._number), token_id):
                raise without_choice(token_id)

            self._number = self._states[self._number].after(token_id, self._number)
        self._row(self._number)

    def _next_kind(self, number: int) -> int | None:
        """The kind of all states that may follow a state; None: there are several."""
        if number not in self._next_kinds:
            state = self._states[number]
            following = set(state.next.values())
            if state.allowed is not None and following:
                following = {state.after(token_id, number) for token_id in state.allowed}
            else:
                following.add(number if state.otherwise is None else state.otherwise)
            kinds = {self._kinds[each] for each in following}
            self._next_kinds[number] = kinds.pop() if len(kinds) == 1 else None
        return self._next_kinds[number]

    def _row(self, number: int) -> Masks:
        """The mask of a state, which must not be written."""
        kind = self._kinds[number]
        row = self._kept.get(kind)
        if row is None:
            row = self._rows.get(kind)
        if row is None:
            if len(self._kept) + len(self._rows) >= self._max_rows:
                del self._rows[next(iter(self._rows))]  # the oldest one
            row = self._rows[kind] = self._made(self._states[kind])
        return row

    def _made(self, state: TokenState) -> Masks:
        is_allowed = np.zeros(32 * self._num_words, dtype=np.bool_)
        is_allowed[: self._vocab_size] = state.allowed is None
        if state.allowed is not None:
            is_allowed[list(state.allowed)] = True
        is_allowed[list(state.forbidden)] = False
        words: Masks = np.packbits(is_allowed, bitorder="little").view("<i4").astype(np.int32)
        words.setflags(write=False)
        return words


class AllLimits:
    """Several constraints, all of which apply. Implements `TokenConstraint`."""

    def __init__(self, parts: Sequence[Limits]) -> None:
        self._parts = parts
        self._has_machines: bool = any(isinstance(part, MachineLimits) for part in parts)
        self._num_possible: int | None = None  # tokens before the first without a choice, by the last masks

    @property
    def is_slow(self) -> bool:
        return any(part.is_slow for part in self._parts)

    def masks(self, draft_token_ids: Sequence[int]) -> Masks:
        """See `TokenConstraint`."""
        masks = self._parts[0].masks(draft_token_ids)
        for part in self._parts[1:]:
            masks = masks & part.masks(draft_token_ids)
        if self._has_machines:
            has_choice = masks.any(axis=1)
            self._num_possible = None if has_choice.all() else int(has_choice.argmin())
        return masks

    def mask_ahead(self) -> Masks | None:
        """See `TokenConstraint`. Without a choice, the mask is left to `masks`."""
        found: Masks | None = None
        for part in self._parts:
            mask = part.mask_ahead()
            if mask is None:
                return None

            found = mask if found is None else found & mask
        return found if found is not None and found.any() else None

    @property
    def can_advance_at_once(self) -> bool:
        """See `Limits`."""
        return all(part.can_advance_at_once for part in self._parts)

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Limits`. RequestError that names the machines where they leave no token beside the others."""
        num_possible, self._num_possible = self._num_possible, None
        if num_possible is not None and num_possible < len(token_ids):
            raise without_choice(token_ids[num_possible])

        for part in self._parts:
            part.advance(token_ids)
