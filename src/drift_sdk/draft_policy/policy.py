"""The number of tokens to draft, from measured tokens and seconds of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drift_sdk.draft_policy.acceptance import Acceptance
from drift_sdk.draft_policy.round_costs import RoundCosts
from drift_sdk.steps import StepPlan, StepResult

__all__ = ["DraftPolicy"]

PROBE_SHARE = 0.005
"""Share of the time that may be lost to rounds that try numbers expected to be worse."""
MIN_PROBE_GAP = 16
MAX_PROBE_GAP = 1000
"""Fewest and most rounds of a bucket between two tries of the same number."""


class DraftPolicy:
    """Chooses the number of draft tokens of a batch, one for all its rows.

    A round with k draft tokens emits 1 + r1 + r1 r2 + ... + r1 ... rk tokens a slot on average, where r_i is
    the acceptance rate of draft token i given that those before it were accepted. The number with the most
    tokens a second is chosen. The others are tried again from time to time, the less often the more time that
    is expected to lose, so every choice is revised.

    choices:      numbers of draft tokens that the executor can run; 0 is added.
    round_costs:  seconds of a round by (bucket of slots, draft tokens), measured before serving. If empty,
                  the first rounds try every number.
    is_adaptive:  choose as described; False: always the largest number.
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
        # Value of `_num_rounds` when a number was last chosen, by (bucket, number).
        self._tried_at: dict[tuple[int, int], int] = {}

    def num_draft_tokens(self, num_slots: int) -> int:
        """The number of draft tokens for the next round of `num_slots` slots."""
        if len(self._choices) == 1:
            return self._choices[0]

        bucket = self._costs.bucket(num_slots)
        self._num_rounds[bucket] = self._num_rounds.get(bucket, 0) + 1
        choice = self._choose(bucket)
        self._tried_at[bucket, choice] = self._num_rounds[bucket]
        return choice

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the result of a step with decode rows.

        Its duration is used only if it had no prefill part. A slot's acceptance is used only if it emitted
        tokens and did not finish, because the end of a sequence may cut a round short.
        """
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
        """Learn from a round.

        num_draft_tokens:  the most planned for a slot.
        duration_s:        seconds of the round; None if unknown.
        slots:             numbers of (planned, accepted) draft tokens of the slots.
        """
        if len(self._choices) == 1:
            return

        self._acceptance.record(slots)
        if duration_s is not None:
            # The executor runs the next larger number it has a graph for.
            num_run = next(choice for choice in self._choices if choice >= num_draft_tokens)
            self._costs.record(self._costs.bucket(num_slots), num_run, duration_s)

    def _choose(self, bucket: int) -> int:
        """A number that was never timed, a number due to be tried again, or the best one."""
        untried = [choice for choice in self._choices if not self._costs.is_known(bucket, choice)]
        if untried:
            return untried[-1]

        seconds = {choice: self._costs.seconds(bucket, choice) for choice in self._choices}
        tokens = {choice: self._acceptance.tokens_of_round(choice) for choice in self._choices}
        best = max(self._choices, key=lambda choice: tokens[choice] / seconds[choice])
        for choice in self._choices:
            # Time lost by such a round, in rounds of `best`: it replaces tokens / tokens of `best` of them.
            lost = seconds[choice] / seconds[best] - tokens[choice] / tokens[best]
            gap = (len(self._choices) - 1) * lost / PROBE_SHARE
            gap = min(max(gap, MIN_PROBE_GAP), MAX_PROBE_GAP)
            if choice != best and self._num_rounds[bucket] - self._tried_at.get((bucket, choice), 0) >= gap:
                return choice

        return best
