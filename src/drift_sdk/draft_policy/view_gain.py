"""The gain of partial verification: tokens a second by rounds over views and refreshes, and by whole rounds.

A round over n keys takes its measured time and n times the seconds of a key, which are learned from whole
rounds of long sequences. A cycle of partial verification is as many rounds over views as fill the pending
rows, and a refresh.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["ViewCosts", "ViewGain"]

SMOOTHING = 0.1
"""Weight of the newest whole round in the seconds of a key."""
MIN_GAIN = 1.03
"""Least ratio of speeds for which views are used: a change between both costs a refresh."""


class ViewCosts(Struct, frozen=True, kw_only=True):
    """Measured costs of partial verification.

    refresh_tokens: most pending rows.
    view_tokens:    keys of a view.
    refresh_reads:  times that a refresh reads the keys and values of a sequence.
    refresh_costs:  seconds of a refresh without context, by slots, as measured before serving; if it is
                    empty, views are used wherever they can be.
    """

    refresh_tokens: int
    view_tokens: int
    refresh_reads: float = 1.0
    refresh_costs: Mapping[int, float] = {}


class ViewGain:
    """Compares rounds over views with whole ones."""

    def __init__(self, costs: ViewCosts) -> None:
        self._costs = costs
        self._key_seconds: float | None = None

    @property
    def is_measured(self) -> bool:
        """True if costs were measured, so that speeds can be compared."""
        return bool(self._costs.refresh_costs)

    def record_whole(self, num_keys: int, seconds: float) -> None:
        """Learn from a whole round of so many keys, which took so many seconds more than without context."""
        if num_keys < 2 * self._costs.view_tokens:
            return  # what a round takes beside its keys would be counted as theirs

        found = max(seconds, 0.0) / num_keys
        known = found if self._key_seconds is None else self._key_seconds
        self._key_seconds = known + SMOOTHING * (found - known)

    def is_faster(
        self,
        lengths: list[int],
        bucket: int,
        whole: Mapping[int, tuple[float, float]],
        partial_seconds: Mapping[int, float],
    ) -> bool:
        """Return True if sequences of these lengths gain by partial verification.

        bucket: of slots. whole: by number of drafts, the tokens that a round emits and its seconds without
        context. partial_seconds: by number of drafts, the seconds of a round over views, as far as they are
        known.
        """
        key_seconds, costs = self._key_seconds, self._costs
        if key_seconds is None:
            return False  # whole rounds show it

        num_keys = sum(lengths)
        num_viewed = sum(min(length, costs.view_tokens) for length in lengths)
        best_whole = max(tokens / (seconds + key_seconds * num_keys) for tokens, seconds in whole.values())
        refresh_seconds = costs.refresh_costs[bucket] + costs.refresh_reads * key_seconds * num_keys
        best_partial = 0.0
        for number, (tokens, seconds) in whole.items():
            if number == 0:
                continue

            # Views read more than expected where their blocks are small.
            round_seconds = max(seconds + key_seconds * num_viewed, partial_seconds.get(number, 0.0))
            num_rounds = max((costs.refresh_tokens - number) / tokens, 1.0)
            cycle = num_rounds * round_seconds + refresh_seconds
            best_partial = max(best_partial, (num_rounds + 1) * tokens / cycle)

        return best_partial > MIN_GAIN * best_whole
