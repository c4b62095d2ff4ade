"""Counts of drafted and accepted tokens."""

from __future__ import annotations

import random

from drift_sdk import SpeculationStats
from drift_sdk.draft_policy import DraftCount


def test_stats_equal_a_count_of_single_rounds() -> None:
    rng = random.Random(3)
    count, rounds = DraftCount(), []
    for _ in range(500):
        num_drafted = rng.randint(0, 5)
        num_accepted = rng.randint(0, num_drafted)
        count.add(num_drafted, num_accepted)
        if num_drafted:
            rounds.append((num_drafted, num_accepted))

        stats, most = count.stats(), max((drafted for drafted, _ in rounds), default=0)
        accepted = [accepted for _, accepted in rounds]
        assert stats.num_rounds == len(rounds)
        assert stats.num_drafted == sum(drafted for drafted, _ in rounds)
        assert stats.num_accepted == sum(accepted)
        assert stats.num_rewound == sum(drafted - accepted for drafted, accepted in rounds)
        assert stats.accepted_at == tuple(sum(n > i for n in accepted) for i in range(most))
        assert stats.rates == tuple(sum(n > i for n in accepted) / len(rounds) for i in range(most))
        assert stats.acceptance_histogram == tuple(accepted.count(n) for n in range(most + 1))


def test_stats_without_drafts() -> None:
    count = DraftCount()
    count.add(0, 0)
    assert count.stats() == SpeculationStats()
    assert (count.stats().acceptance_length, count.stats().rates) == (0.0, ())


def test_stats_of_rejected_drafts() -> None:
    count = DraftCount()
    for num_drafted in (1, 3, 2):
        count.add(num_drafted, 0)
    stats = count.stats()
    assert (stats.acceptance_length, stats.num_rewound) == (1.0, 6)
    assert stats.accepted_at == (0, 0, 0)
    assert stats.acceptance_histogram == (3, 0, 0, 0)


def test_ngrams_in_place_of_drafts_are_counted_by_themselves() -> None:
    count = DraftCount()
    count.add(3, 2)
    count.add(4, 4, is_ngram=True)
    count.add(2, 0, is_ngram=True)
    count.add(0, 0, is_ngram=True)
    stats = count.stats()
    assert (stats.num_rounds, stats.num_drafted, stats.num_accepted) == (3, 9, 6)
    assert (stats.num_ngram_rounds, stats.num_ngram_drafted, stats.num_ngram_accepted) == (2, 6, 4)


def test_rates_without_rounds_are_zero() -> None:
    assert SpeculationStats(accepted_at=(0, 0)).rates == (0.0, 0.0)


def test_rounds_of_partial_verification_are_counted_also_without_drafts() -> None:
    count = DraftCount()
    count.add(3, 1, verification="partial")
    count.add(0, 0, verification="partial")
    count.add(0, 0, verification="refresh")
    count.add(3, 2)
    stats = count.stats()
    assert (stats.num_partial_rounds, stats.num_refresh_rounds, stats.num_rounds) == (2, 1, 2)
