"""Counts of drafted and accepted tokens."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from drift_sdk.results import SpeculationStats
from drift_sdk.steps import Verification
from drift_sdk.trees import MAX_PATH_LENGTH

__all__ = ["DraftCount"]


class DraftCount:
    """The numbers of drafted and accepted tokens of a request, or of an engine."""

    def __init__(self) -> None:
        self._num_drafted = 0
        self._verifications = Counter[Verification]()
        self._ngrams = [0, 0, 0]  # rounds, drafted and accepted tokens of them that were n-grams
        # Number of rounds by accepted tokens, from 0 to the most tokens ever drafted in a round; no more than
        # a path of a tree can have.
        self._num_rounds_of = [0]

    def add(
        self,
        num_drafted: int,
        num_accepted: int,
        *,
        is_ngram: bool = False,
        verification: Verification = "whole",
    ) -> None:
        """Count a round of one slot. One without drafted tokens is ignored, except for its verification.
        is_ngram: of `SlotOutput`. verification: of `StepPlan`."""
        if verification != "whole":
            self._verifications[verification] += 1
        if num_drafted == 0:
            return

        self._num_drafted += num_drafted
        if is_ngram:
            added = (1, num_drafted, num_accepted)
            self._ngrams = [total + more for total, more in zip(self._ngrams, added, strict=True)]
        most = min(num_drafted, MAX_PATH_LENGTH)
        if most >= len(self._num_rounds_of):
            self._num_rounds_of += [0] * (most + 1 - len(self._num_rounds_of))
        self._num_rounds_of[num_accepted] += 1

    def stats(self) -> SpeculationStats:
        """The counts so far."""
        # Entry i: the number of rounds that accepted i tokens or more.
        num_rounds, *accepted_at = [*accumulate(reversed(self._num_rounds_of))][::-1]
        return SpeculationStats(
            num_rounds=num_rounds,
            num_drafted=self._num_drafted,
            num_accepted=sum(accepted_at),
            accepted_at=tuple(accepted_at),
            num_ngram_rounds=self._ngrams[0],
            num_ngram_drafted=self._ngrams[1],
            num_ngram_accepted=self._ngrams[2],
            num_partial_rounds=self._verifications["partial"],
            num_refresh_rounds=self._verifications["refresh"],
        )
