"""The number of prefill tokens of a step, from latency targets and measured step times."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil

__all__ = ["TokenBudget"]

MIN_TOKENS = 16
"""Smallest budget under a latency target, so that prompts always progress."""
SMOOTHING = 0.1
"""Weight of the newest step in the exponential averages."""
WINDOW = 128
"""Number of latest steps whose ratios of measured to predicted time give the percentiles."""
SPREAD_ROWS = 24
"""Decode rows for each mixed step over which the waiting prompt tokens are spread: the more rows decode, the
shorter are the steps that all of them wait for, and the longer the prompts wait."""
MIN_SPREAD_TOKENS = 192
"""Least tokens of a step when prompts are spread: if fewer wait, one step takes them all."""


class TokenBudget:
    """Chooses how many prefill tokens the next step may take.

    Without decode rows: all of `max_tokens`, since no sequence waits for its next token. Otherwise the first
    of these rules that applies:

    - With a latency target, as many tokens as the predicted step time allows, `MIN_TOKENS` at least. Targets
      take precedence over `prefer_high_throughput`. The predicted time of a step is decode time + tokens x
      time per token, both exponential averages. The ratios of measured to predicted time in the last `WINDOW`
      steps tell how far the median and the 95th percentile lie from the prediction.
    - With `prefer_high_throughput`, all of `max_tokens`.
    - If one pass can compute prompts together with the decode rows: the waiting tokens, spread over a step
      for every SPREAD_ROWS decode rows, or over fewer steps if a sequence gets several tokens from each. This
      is at least MIN_SPREAD_TOKENS, if so many wait, and rounded up to the next size of such a pass
      (`mixed_tokens`, as in SchedulerConfig), if there is one. At most half of `max_tokens`, a block at
      least, times the average number of tokens that a decoding sequence gets from a step: a round of
      speculation emits several tokens, so it may take longer in proportion. At most `max_tokens`.
    - Two passes take longer: a quarter of `max_tokens` in place of half, however many tokens wait.

    The last two rules also apply with a latency target until a step with prefill tokens has been measured.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        block_size: int,
        mixed_tokens: Mapping[int, Sequence[tuple[int, Sequence[int]]]] = {},
        target_latency_ms_p50: float | None = None,
        target_latency_ms_p95: float | None = None,
        prefer_high_throughput: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.min_tokens: int = min(MIN_TOKENS, max_tokens)
        self._block_size = block_size
        self._mixed_tokens = mixed_tokens
        self._tokens_per_row = 1.0
        self._prefers_throughput = prefer_high_throughput
        targets = ((0.5, target_latency_ms_p50), (0.95, target_latency_ms_p95))
        self._targets = [(quantile, ms / 1e3) for quantile, ms in targets if ms is not None]

        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._ratios: deque[float] = deque()  # measured / predicted time of steps with decode rows
        self._sorted_ratios: list[float] = []

    def num_tokens(
        self, num_decode_rows: int, num_waiting_tokens: int, num_draft_tokens: int | None = 0
    ) -> int:
        """The budget of a step with `num_decode_rows` decode rows, of at most `num_draft_tokens` draft tokens
        each, while `num_waiting_tokens` tokens of prompts wait to be computed. None: rows that share no pass
        with chunks."""
        if num_decode_rows == 0:
            return self.max_tokens

        if not self._targets:
            if self._prefers_throughput:
                return self.max_tokens

            return self._fair_share(num_decode_rows, num_waiting_tokens, num_draft_tokens)

        if self._token_s is None:
            return self._fair_share(num_decode_rows, num_waiting_tokens, num_draft_tokens)

        wanted_s = min(target_s / self._ratio(quantile) for quantile, target_s in self._targets)
        room_s = wanted_s - (self._decode_s or 0.0)
        if room_s <= 0.0:
            return self.min_tokens

        if room_s >= self.max_tokens * self._token_s:
            return self.max_tokens

        return max(int(room_s / self._token_s), self.min_tokens)

    def _fair_share(self, num_decode_rows: int, num_waiting_tokens: int, num_draft_tokens: int | None) -> int:
        """The budget of the last two rules of the class."""
        mixed = () if num_draft_tokens is None else self._mixed_tokens.get(num_draft_tokens, ())
        for most_rows, sizes in mixed:
            if num_decode_rows <= most_rows:
                num_steps = max(1.0, num_decode_rows / SPREAD_ROWS / self._tokens_per_row)
                wanted = max(num_waiting_tokens / num_steps, min(num_waiting_tokens, MIN_SPREAD_TOKENS))
                size = next((size for size in sizes if size >= wanted), sizes[-1])
                return min(size, self._share(2))

        return self._share(4)

    def _share(self, divisor: int) -> int:
        """A part of `max_tokens`, in proportion to the tokens that a decoding sequence gets from a step."""
        share = min(self.max_tokens, max(self.max_tokens // divisor, self._block_size))
        return min(self.max_tokens, int(share * self._tokens_per_row))

    def observe(
        self, num_prefill_tokens: int, num_decode_rows: int, num_decoded_tokens: int, duration_s: float
    ) -> None:
        """Update the averages with a completed step.

        duration_s:          seconds the device worked on it.
        num_decoded_tokens:  tokens that its `num_decode_rows` decode rows emitted.
        """
        if num_decode_rows:
            self._tokens_per_row = _average(self._tokens_per_row, num_decoded_tokens / num_decode_rows)
        if not self._targets or num_prefill_tokens + num_decode_rows == 0:
            return

        decode_s = (self._decode_s or 0.0) if num_decode_rows else 0.0
        predicted_s = decode_s + num_prefill_tokens * (self._token_s or 0.0)
        if num_decode_rows and predicted_s > 0.0:
            self._record_ratio(duration_s / predicted_s)

        if num_prefill_tokens:
            # All time beyond the decode time is attributed to the prefill tokens, so an unknown or outdated
            # decode time still leads to a budget that meets the target.
            token_s = max(duration_s - decode_s, 0.0) / num_prefill_tokens
            self._token_s = _average(self._token_s, token_s)

        if num_prefill_tokens == 0 or duration_s < decode_s:
            # Under load every step may have prefill tokens. One that took less than the average decode time
            # shows that decoding has become faster.
            self._decode_s = _average(self._decode_s, duration_s)

    def _record_ratio(self, ratio: float) -> None:
        if len(self._ratios) == WINDOW:
            oldest = self._ratios.popleft()
            del self._sorted_ratios[bisect_left(self._sorted_ratios, oldest)]

        self._ratios.append(ratio)
        insort(self._sorted_ratios, ratio)

    def _ratio(self, quantile: float) -> float:
        """The quantile (0 to 1) of the latest ratios; 1.0 if there are none."""
        if not self._sorted_ratios:
            return 1.0

        ratio = self._sorted_ratios[ceil(quantile * len(self._sorted_ratios)) - 1]
        return ratio if ratio > 0.0 else 1.0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
