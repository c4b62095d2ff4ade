from __future__ import annotations

from drift_sdk.results import SpeculationStats

__all__ = ["DraftCount"]


class DraftCount:
    """Adds up what became of a request's drafts."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._accepted_at: list[int] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            return

        self._num_rounds += 1
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        self._accepted_at += [0] * (num_drafted - len(self._accepted_at))
        for position in range(num_accepted):
            self._accepted_at[position] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            num_rounds=self._num_rounds,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
            accepted_at=tuple(self._accepted_at),
        )
