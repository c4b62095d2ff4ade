from __future__ import annotations

import random

import pytest

from drift_sdk.speculation.policy import DraftPolicy


def play(policy: DraftPolicy, rate: float, cost, num_rounds: int, num_slots: int = 4) -> list[int]:
    """Rounds against a draft of the given acceptance rate; the choices made."""
    rng = random.Random(3)
    choices = []
    for _ in range(num_rounds):
        k = policy.num_draft_tokens(num_slots)
        accepted = []
        for _ in range(num_slots):
            count = 0
            while count < k and rng.random() < rate:
                count += 1
            accepted.append((k, count))
        policy.record(num_slots, k, cost(k) * rng.uniform(0.97, 1.03), accepted)
        choices.append(k)
    return choices


@pytest.mark.parametrize(
    ("rate", "cost", "best"),
    [
        (0.9, lambda k: 1 + 0.05 * k, 5),  # a good draft, cheap rounds
        (0.9, lambda k: 1 + 1.0 * k, 0),  # a good draft, dear rounds
        (0.05, lambda k: 1 + 0.2 * k, 0),  # a bad draft
        (0.6, lambda k: 1 + 0.15 * k, 3),  # in between
    ],
)
def test_the_best_ratio_wins_and_others_are_probed(rate: float, cost, best: int) -> None:
    choices = play(DraftPolicy([1, 3, 5], is_adaptive=True), rate, cost, 600)
    settled = choices[200:]
    assert settled.count(best) / len(settled) > 0.8
    assert set(settled) == {0, 1, 3, 5}  # never permanently off


def test_it_recovers_when_the_draft_gets_better() -> None:
    policy = DraftPolicy([1, 3, 5], is_adaptive=True)
    assert play(policy, 0.05, lambda k: 1 + 0.2 * k, 300)[-20:].count(0) >= 19
    assert play(policy, 0.95, lambda k: 1 + 0.2 * k, 600)[-20:].count(5) >= 19


def test_without_adapting_the_chain_is_always_drafted() -> None:
    assert set(play(DraftPolicy([1, 3], is_adaptive=False), 0.0, lambda k: 1.0 + k, 50)) == {3}
