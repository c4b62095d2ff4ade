"""What rounds cost: as measured beforehand, and as they turn out."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RoundCosts"]

SMOOTHING = 0.1  # weight of the newest round in what all rounds of a bucket share
OWN_SMOOTHING = 0.03  # and in what rounds of one number of drafts take
MAX_SURPRISE = 0.5  # of what was expected; a round may have been held up


class RoundCosts:
    """Seconds of a round by (bucket of slots, drafted tokens).

    `measured`: before serving, so of rounds without a context. What serving takes more is attention mostly,
    much the same for any number of drafts: it is learnt for the bucket as a whole, and slowly for each number
    of drafts what is left of the difference. Nothing measured: rounds of each number tell its own cost, by
    powers of two of slots.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        self._costs = dict(measured)
        self._is_measured = bool(measured)
        self._buckets = sorted({bucket for bucket, _ in measured})
        self._excess: dict[int, float] = {}

    def bucket(self, num_slots: int) -> int:
        for bucket in self._buckets:
            if num_slots <= bucket:
                return bucket

        return 1 << max(num_slots - 1, 0).bit_length()

    def is_known(self, bucket: int, num_draft_tokens: int) -> bool:
        return (bucket, num_draft_tokens) in self._costs

    def seconds(self, bucket: int, num_draft_tokens: int) -> float:
        return self._costs[bucket, num_draft_tokens] + self._excess.get(bucket, 0.0)

    def record(self, bucket: int, num_draft_tokens: int, duration_s: float) -> None:
        key = bucket, num_draft_tokens
        if key not in self._costs:
            self._costs[key] = duration_s
            return

        expected = self.seconds(*key)
        # A slow round may have been held up, even the first of its kind; a fast one shows what can be.
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
