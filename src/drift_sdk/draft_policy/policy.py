"""How many tokens to draft: what a round yields over what it costs, both measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drift_sdk.draft_policy.acceptance import Acceptance
from drift_sdk.draft_policy.round_costs import RoundCosts
from drift_sdk.steps import StepPlan, StepResult

__all__ = ["DraftPolicy"]

PROBE_SHARE = 0.005  # of the time may go into trying what is thought to be worse
MIN_PROBE_GAP = 16  # rounds, each number of drafts
MAX_PROBE_GAP = 1000


class DraftPolicy:
    """Chooses one number of draft tokens for a batch, among those the executor has graphs for.

    A round of k drafts is worth 1 + r1 + r1 r2 + ... tokens a slot, r_i being the rate at which the i-th
    draft is accepted once those before it were. The best ratio to the round's cost wins. Whatever does not
    win is tried again, the more rarely the more that is thought to lose, so no choice is for ever. Without
    `is_adaptive`, the largest is always taken.

    `round_costs`: seconds by (bucket of slots, drafts), measured before serving; where there are none, the
    first rounds try every number.
    """

    def __init__(
        self,
        choices: Sequence[int],
        round_costs: Mapping[tuple[int, int], float] = {},
        *,
        is_adaptive: bool,
    ) -> None:
        self._choices = sorted({0, *choices}) if is_adaptive else [max(choices)]
        self._acceptance = Acceptance(max(choices))
        self._costs = RoundCosts(round_costs)
        self._num_rounds: dict[int, int] = {}  # by bucket
        self._tried_at: dict[tuple[int, int], int] = {}

    def num_draft_tokens(self, num_slots: int) -> int:
        if len(self._choices) == 1:
            return self._choices[0]

        bucket = self._costs.bucket(num_slots)
        self._num_rounds[bucket] = self._num_rounds.get(bucket, 0) + 1
        choice = self._choose(bucket)
        self._tried_at[bucket, choice] = self._num_rounds[bucket]
        return choice

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step with decode rows. Its duration tells something if there was no prompt in it."""
        most = max(row.num_draft_tokens for row in plan.decode)
        slots = [
            (row.num_draft_tokens, output.num_accepted)
            for row, output in zip(plan.decode, result.decode, strict=True)
            if output.token_ids and output.finish is None
        ]
        self.record(len(plan.decode), most, None if plan.prefill else result.duration_s, slots)

    def record(
        self,
        num_slots: int,
        num_draft_tokens: int,
        duration_s: float | None,
        slots: Sequence[tuple[int, int]],
    ) -> None:
        """The time of a round, and (planned, accepted) drafts of its slots."""
        if len(self._choices) == 1:
            return

        self._acceptance.record(slots)
        if duration_s is not None:
            # Rows may be planned shorter than what the executor runs.
            num_run = next(choice for choice in self._choices if choice >= num_draft_tokens)
            self._costs.record(self._costs.bucket(num_slots), num_run, duration_s)

    def _choose(self, bucket: int) -> int:
        untried = [choice for choice in self._choices if not self._costs.is_known(bucket, choice)]
        if untried:
            return untried[-1]

        seconds = {choice: self._costs.seconds(bucket, choice) for choice in self._choices}
        tokens = {choice: self._acceptance.tokens_of_round(choice) for choice in self._choices}
        best = max(self._choices, key=lambda choice: tokens[choice] / seconds[choice])
        for choice in self._choices:
            # Rounds of the best that the same tokens take are not lost.
            lost = seconds[choice] / seconds[best] - tokens[choice] / tokens[best]
            gap = (len(self._choices) - 1) * lost / PROBE_SHARE
            gap = min(max(gap, MIN_PROBE_GAP), MAX_PROBE_GAP)
            if choice != best and self._num_rounds[bucket] - self._tried_at.get((bucket, choice), 0) >= gap:
                return choice

        return best
