"""The time that rounds take, measured before serving and updated while serving."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RoundCosts"]

SMOOTHING = 0.1
"""Weight of the newest round in the excess time that all rounds of a bucket share."""
OWN_SMOOTHING = 0.03
"""Weight of the newest round in the time of its own number of draft tokens."""
MAX_SURPRISE = 0.5
"""Largest excess over the expected time that is taken into account, as a share of it: a slow round may have
been delayed by something else."""


class RoundCosts:
    """Seconds of a round by (bucket of slots, number of draft tokens).

    measured: times measured before serving, so with short contexts. Rounds while serving take longer, mostly
    in attention, by about the same time for any number of draft tokens. This excess is learned for the bucket
    as a whole; what remains of the difference is learned more slowly for each number. If `measured` is empty,
    the times of each number are learned separately, and buckets are powers of two.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        self._costs = dict(measured)
        self._is_measured = bool(measured)
        self._buckets = sorted({bucket for bucket, _ in measured})
        self._excess: dict[int, float] = {}  # seconds beyond the measured time, by bucket

    def bucket(self, num_slots: int) -> int:
        """The smallest measured bucket that holds so many slots, else the next power of two."""
        for bucket in self._buckets:
            if num_slots <= bucket:
                return bucket

        return 1 << max(num_slots - 1, 0).bit_length()

    def is_known(self, bucket: int, num_draft_tokens: int) -> bool:
        """Whether the round has been measured or recorded."""
        return (bucket, num_draft_tokens) in self._costs

    def seconds(self, bucket: int, num_draft_tokens: int) -> float:
        """The expected seconds of a known round."""
        return self._costs[bucket, num_draft_tokens] + self._excess.get(bucket, 0.0)

    def record(self, bucket: int, num_draft_tokens: int, duration_s: float) -> None:
        """Update the expectation with a round that took `duration_s` seconds."""
        key = bucket, num_draft_tokens
        if key not in self._costs:
            self._costs[key] = duration_s
            return

        expected = self.seconds(*key)
        # A slow round, even the first of its kind, may have been delayed by something else; a fast one cannot
        # be an accident, so it counts in full.
        surprise = min(duration_s - expected, MAX_SURPRISE * expected)
        is_fast = duration_s < expected / 2
        weight = 1.0 if is_fast else SMOOTHING
        if not self._is_measured:
            self._costs[key] += weight * surprise
        elif bucket not in self._excess:
            self._excess[bucket] = max(duration_s - expected, 0.0)
        else:
            self._excess[bucket] = max(self._excess[bucket] + weight * surprise, 0.0)
            if not is_fast:
                self._costs[key] += OWN_SMOOTHING * surprise
