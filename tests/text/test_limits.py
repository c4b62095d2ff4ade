"""Limits of tokens: masks that are known a token ahead, and how often masks are made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drift_sdk import RequestError, TokenMachine, TokenState
from drift_sdk.text import limits as limits_module
from drift_sdk.text.limits import AllLimits, Limits, MachineLimits, is_allowed

VOCAB_SIZE = 70


def drawn_machine(seed: int) -> TokenMachine:
    """A machine with some states of equal masks, some of which follow a state whatever the token is."""
    rng = random.Random(seed)
    masks: list[dict[str, Any]] = [
        {},
        {"forbidden": tuple(rng.sample(range(VOCAB_SIZE), 8))},
        {"allowed": tuple(rng.sample(range(VOCAB_SIZE), 5))},
    ]
    num_states = rng.randint(1, 6)
    return TokenMachine(
        tuple(
            TokenState(
                **rng.choice(masks),
                next={
                    rng.randrange(VOCAB_SIZE): rng.randrange(num_states) for _ in range(rng.choice((0, 0, 3)))
                },
                otherwise=rng.choice([None, *range(num_states)]),
            )
            for _ in range(num_states)
        )
    )


def choices(limits: Limits) -> list[int]:
    """The tokens that may be next."""
    (row,) = limits.masks(())
    return [token_id for token_id in range(VOCAB_SIZE) if is_allowed(row, token_id)]


def walked(machines: Sequence[TokenMachine], token_ids: Sequence[int]) -> Limits:
    """The limits of machines after tokens."""
    parts = [MachineLimits(machine, VOCAB_SIZE) for machine in machines]
    limits: Limits = parts[0] if len(parts) == 1 else AllLimits(parts)
    for token_id in token_ids:
        limits.masks(())
        limits.advance([token_id])
    return limits


@pytest.mark.parametrize("num_machines", [1, 2])
def test_a_mask_ahead_is_the_mask_after_every_token_that_may_be_next(num_machines: int) -> None:
    num_known = num_open = 0
    for seed in range(60):
        rng = random.Random(seed)
        machines = [drawn_machine(rng.randrange(10**6)) for _ in range(num_machines)]
        token_ids: list[int] = []
        for _ in range(4):
            limits = walked(machines, token_ids)
            possible = choices(limits)
            if not possible:
                break

            ahead = limits.mask_ahead()
            after = {walked(machines, [*token_ids, each]).masks(()).tobytes() for each in possible}
            if ahead is None:
                num_open += 1
            else:
                num_known += 1
                assert limits.can_advance_at_once
                assert after == {ahead.tobytes()}
            token_ids.append(rng.choice(possible))
    assert num_known > 30 and num_open > 30


def test_two_machines_without_a_choice_ahead_are_named() -> None:
    """The mask without a choice is left to `masks`, after which the token is not allowed."""
    states = TokenState(allowed=(7,), otherwise=1), TokenState(allowed=(8,))
    other = TokenMachine((TokenState(forbidden=(8,)),))
    limits = AllLimits([MachineLimits(TokenMachine(states), VOCAB_SIZE), MachineLimits(other, VOCAB_SIZE)])
    assert choices(limits) == [7] and limits.mask_ahead() is None
    limits.advance([7])
    assert choices(limits) == []
    with pytest.raises(RequestError, match="they forbid the next token, 8"):
        limits.advance([8])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TokenState]:
    """The states whose masks have been made: each is a pass over the vocabulary."""
    states: list[TokenState] = []
    make = MachineLimits._made

    def counted(self: MachineLimits, state: TokenState) -> Any:
        states.append(state)
        return make(self, state)

    monkeypatch.setattr(MachineLimits, "_made", counted)
    return states


def step(limits: Limits, token_id: int) -> None:
    limits.masks(())
    limits.mask_ahead()
    limits.advance([token_id])


def test_a_hundred_steps_make_no_more_masks_than_there_are_states(made: list[TokenState]) -> None:
    count = 4
    states = [TokenState(forbidden=(number,), otherwise=(number + 1) % count) for number in range(count)]
    limits = MachineLimits(TokenMachine((*states, TokenState())), VOCAB_SIZE)
    for _ in range(100):
        step(limits, 50)
    assert made == states  # the fifth is never reached


def test_states_of_equal_masks_share_one(made: list[TokenState]) -> None:
    states = [TokenState(forbidden=(1, 2), otherwise=(number + 1) % 9) for number in range(9)]
    limits = MachineLimits(TokenMachine(tuple(states)), VOCAB_SIZE)
    for _ in range(100):
        step(limits, 50)
        assert limits.mask_ahead() is not None
    assert len(made) == 1


def test_masks_of_states_with_many_ids_are_made_with_the_request(
    made: list[TokenState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "MANY_IDS", 10)
    large = [TokenState(allowed=tuple(range(number, 60)), otherwise=1 - number) for number in range(2)]
    limits = MachineLimits(TokenMachine(tuple(large)), VOCAB_SIZE)
    assert len(made) == 2
    for number in range(10):
        assert limits.can_advance_at_once
        ahead = limits.mask_ahead()
        assert ahead is not None and is_allowed(ahead, 0) == (number % 2 == 1)
        step(limits, 50)
    assert len(made) == 2


def test_a_text_thread_follows_a_machine_whose_states_name_too_many_ids(
    made: list[TokenState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "MANY_IDS", 10)
    monkeypatch.setattr(limits_module, "MAX_PREPARED_IDS", 100)
    large = [TokenState(allowed=tuple(range(number, 60)), otherwise=1 - number) for number in range(2)]
    limits = MachineLimits(TokenMachine(tuple(large)), VOCAB_SIZE)
    assert not limits.can_advance_at_once and limits.mask_ahead() is None
    assert made == large[:1]
    limits.advance([50])
    assert made == large  # the mask is made by `advance`, not when the step is launched
    assert choices(limits) == list(range(1, 60))


def test_the_masks_that_are_kept_are_bounded(made: list[TokenState], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "MAX_ROW_BYTES", 16 * 4 * -(-VOCAB_SIZE // 32))
    states = tuple(TokenState(forbidden=(number,), otherwise=(number + 1) % 60) for number in range(60))
    limits = MachineLimits(TokenMachine(states), VOCAB_SIZE)
    for number in range(90):
        assert choices(limits) == [each for each in range(VOCAB_SIZE) if each != number % 60]
        step(limits, 65)
    assert len(limits._rows) == 16
    assert len(made) == 91 and np.shares_memory(limits._row(30), limits._row(30))
