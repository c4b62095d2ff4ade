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


class MachineLimits:
    """The tokens that a `TokenMachine` allows. Implements `TokenConstraint`; the masks of its states are made
    when they are first needed."""

    is_slow = False

    def __init__(self, machine: TokenMachine, vocab_size: int) -> None:
        self._machine = machine
        self._vocab_size = vocab_size
        self._number = 0  # of the state
        self._rows: dict[int, Masks] = {}  # by state

    def masks(self, draft_token_ids: Sequence[int]) -> Masks:
        """See `TokenConstraint`."""
        number = self._number
        rows = [self._row(number)]
        for token_id in draft_token_ids:
            number = self._machine.states[number].after(token_id, number)
            rows.append(self._row(number))
        return np.stack(rows)

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Limits`."""
        for token_id in token_ids:
            if not is_allowed(self._row(self._number), token_id):
                raise without_choice(token_id)

            self._number = self._machine.states[self._number].after(token_id, self._number)

    def _row(self, number: int) -> Masks:
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self._made(self._machine.states[number])
        return row

    def _made(self, state: TokenState) -> Masks:
        num_words = -(-self._vocab_size // 32)
        is_allowed = np.zeros(32 * num_words, dtype=np.bool_)
        is_allowed[: self._vocab_size] = state.allowed is None
        if state.allowed is not None:
            is_allowed[list(state.allowed)] = True
        is_allowed[list(state.forbidden)] = False
        words: Masks = np.packbits(is_allowed, bitorder="little").view("<i4").astype(np.int32)
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

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Limits`. RequestError that names the machines where they leave no token beside the others."""
        num_possible, self._num_possible = self._num_possible, None
        if num_possible is not None and num_possible < len(token_ids):
            raise without_choice(token_ids[num_possible])

        for part in self._parts:
            part.advance(token_ids)
