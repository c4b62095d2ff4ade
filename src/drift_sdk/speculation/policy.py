"""How many tokens to draft: what a round yields over what it costs, both measured."""

from __future__ import annotations

from collections.abc import Sequence

from drift_sdk.steps import StepPlan, StepResult

__all__ = ["DraftPolicy"]

SMOOTHING = 0.1  # weight of the newest round in a cost
PROBE_EVERY = 32  # rounds; a choice that once was bad is tried again
MEMORY = 0.99  # share of what is known about acceptance that a round leaves
PRIOR_RATE = 0.6  # of a draft's position about which nothing is known, or no longer
PRIOR_WEIGHT = 2.0  # slots


class DraftPolicy:
    """Chooses one number of draft tokens for a batch, among those the executor has graphs for.

    A round of k drafts is worth 1 + r1 + r1 r2 + ... tokens a slot, r_i being the rate at which the i-th
    draft is accepted once those before it were. Its cost is the measured time of rounds of that k at about
    that many slots. The best ratio wins. What is known fades, and every `PROBE_EVERY` rounds the least
    recently tried number is tried, so no choice is for ever. Without `is_adaptive`, the largest is always
    taken.
    """

    def __init__(self, choices: Sequence[int], *, is_adaptive: bool) -> None:
        self._choices = sorted({0, *choices}) if is_adaptive else [max(choices)]
        self._hits = [0.0] * max(choices)  # by position in the draft
        self._trials = [0.0] * max(choices)
        self._costs: dict[tuple[int, int], float] = {}  # by (bucket of slots, drafts), seconds
        self._tried_at: dict[tuple[int, int], int] = {}
        self._num_rounds = 0

    def num_draft_tokens(self, num_slots: int) -> int:
        if len(self._choices) == 1:
            return self._choices[0]

        bucket = bucket_of(num_slots)
        self._num_rounds += 1
        untried = [k for k in self._choices if (bucket, k) not in self._costs]
        if untried:
            choice = untried[-1]
        elif self._num_rounds % PROBE_EVERY == 0:
            choice = min(self._choices, key=lambda k: self._tried_at.get((bucket, k), -1))
        else:
            choice = max(self._choices, key=lambda k: self.tokens_of_round(k) / self._costs[bucket, k])

        self._tried_at[bucket, choice] = self._num_rounds
        return choice

    def tokens_of_round(self, num_draft_tokens: int) -> float:
        """Expected tokens a slot emits."""
        total = reached = 1.0
        for hits, trials in zip(self._hits[:num_draft_tokens], self._trials, strict=False):
            reached *= (hits + PRIOR_RATE * PRIOR_WEIGHT) / (trials + PRIOR_WEIGHT)
            total += reached

        return total

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step of decode rows alone. Its k is the most that was drafted for a row."""
        num_drafts = max(row.num_draft_tokens for row in plan.decode)
        accepted = [(output.num_drafted, output.num_accepted) for output in result.decode]
        self.record(len(plan.decode), num_drafts, result.duration_s, accepted)

    def record(
        self, num_slots: int, num_draft_tokens: int, duration_s: float, accepted: Sequence[tuple[int, int]]
    ) -> None:
        """The time of a round, and (drafted, accepted) of every slot."""
        key = bucket_of(num_slots), num_draft_tokens
        known = self._costs.get(key)
        self._costs[key] = duration_s if known is None else known + SMOOTHING * (duration_s - known)
        self._hits = [hits * MEMORY for hits in self._hits]
        self._trials = [trials * MEMORY for trials in self._trials]
        for num_drafted, num_accepted in accepted:
            for position in range(min(num_accepted + 1, num_drafted)):
                self._hits[position] += position < num_accepted
                self._trials[position] += 1.0


def bucket_of(num_slots: int) -> int:
    """The power of two at or above."""
    return 1 << max(num_slots - 1, 0).bit_length()
