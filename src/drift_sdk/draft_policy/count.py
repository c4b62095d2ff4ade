from __future__ import annotations

from itertools import accumulate

from drift_sdk.results import SpeculationStats

__all__ = ["DraftCount"]


class DraftCount:
    """Adds up what became of drafts: of a request's, or of an engine's."""

    def __init__(self) -> None:
        self._num_drafted = 0
        self._num_rounds_of = [0]  # by accepted tokens, up to the most ever drafted in a round

    def add(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            return

        self._num_drafted += num_drafted
        if num_drafted >= len(self._num_rounds_of):
            self._num_rounds_of += [0] * (num_drafted + 1 - len(self._num_rounds_of))
        self._num_rounds_of[num_accepted] += 1

    def stats(self) -> SpeculationStats:
        # Rounds that accepted as many or more.
        num_rounds, *accepted_at = [*accumulate(reversed(self._num_rounds_of))][::-1]
        return SpeculationStats(
            num_rounds=num_rounds,
            num_drafted=self._num_drafted,
            num_accepted=sum(accepted_at),
            accepted_at=tuple(accepted_at),
        )
