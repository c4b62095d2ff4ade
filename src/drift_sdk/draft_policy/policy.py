"""The number of tokens to draft, from measured tokens and seconds of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drift_sdk.draft_policy.acceptance import Acceptance, NodeAcceptance
from drift_sdk.draft_policy.round_costs import RoundCosts
from drift_sdk.draft_policy.view_gain import ViewCosts, ViewGain
from drift_sdk.steps import StepPlan, StepResult
from drift_sdk.trees import max_batch_drafts

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
    has_trees:    drafts form trees. A round with k draft tokens has the k best nodes of a tree, and emits 1 +
                  p1 + ... + pk tokens a slot on average, where p_i is the probability that node i is
                  accepted. Of the numbers, only those apply with which the trees of a batch have no more
                  nodes together than a round may have (`MAX_TREE_ROWS`); without any, nothing is drafted.
    view_costs:   of partial verification; None without it. Rounds over views have costs of their own, and
                  always draft.
    """

    def __init__(
        self,
        choices: Sequence[int],
        round_costs: Mapping[tuple[int, int], float] = {},
        *,
        is_adaptive: bool,
        has_trees: bool = False,
        view_costs: ViewCosts | None = None,
    ) -> None:
        self._is_adaptive, self._has_trees = is_adaptive, has_trees
        self._choices = sorted({0, *choices})
        self._chains, self._trees = Acceptance(max(choices)), NodeAcceptance(max(choices))
        self._costs = RoundCosts(round_costs)
        self._measured = dict(round_costs)
        self._gain = ViewGain(view_costs) if view_costs is not None else None
        self._view_costs = RoundCosts(round_costs)
        self._num_rounds: dict[int, int] = {}  # by bucket
        # Value of `_num_rounds` when a number was last chosen, by (bucket, number).
        self._tried_at: dict[tuple[int, int], int] = {}

    def wants_views(self, lengths: list[int]) -> bool:
        """Return True if rounds of sequences of these lengths should be verified over views: where that is
        expected to be faster, or wherever it is possible if costs were not measured."""
        gain = self._gain
        assert gain is not None, "no partial verification was configured"
        if not self._is_adaptive or not gain.is_measured:
            return True

        bucket = self._costs.bucket(len(lengths))
        whole = {
            choice: (self._chains.tokens_of_round(choice), self._measured[bucket, choice])
            for choice in self._choices
        }
        partial = {choice: self._view_costs.seconds(bucket, choice) for choice in self._choices}
        return gain.is_faster(lengths, bucket, whole, partial)

    def num_draft_tokens(self, num_slots: int, *, over_views: bool = False) -> int:
        """The number of draft tokens for the next round of `num_slots` slots."""
        choices, costs = self._choices, self._view_costs if over_views else self._costs
        if over_views:
            choices = choices[1:]
        if self._has_trees:
            most = max_batch_drafts(num_slots)
            choices = [choice for choice in choices if choice <= most]
        if not self._is_adaptive or len(choices) == 1:
            return choices[-1]

        bucket = self._costs.bucket(num_slots)
        self._num_rounds[bucket] = self._num_rounds.get(bucket, 0) + 1
        choice = self._choose(bucket, choices, costs)
        self._tried_at[bucket, choice] = self._num_rounds[bucket]
        return choice

    def observe(self, plan: StepPlan, result: StepResult, *, num_keys: int = 0) -> None:
        """Learn from the result of a step with decode rows. num_keys: of its sequences together.

        Its duration is used only if it had no prefill part. A slot's acceptance is used only if it emitted
        tokens and did not finish, because the end of a sequence may cut a round short.
        """
        most = max(row.num_draft_tokens for row in plan.decode)
        rows = [
            (row.num_draft_tokens, output)
            for row, output in zip(plan.decode, result.decode, strict=True)
            if output.token_ids and output.finish is None
        ]
        duration_s = None if plan.prefill else result.duration_s
        if not self._has_trees:
            slots = [(num_planned, output.num_accepted) for num_planned, output in rows]
            if self._gain is not None and duration_s is not None:
                duration_s = self._record_views(plan, most, duration_s, num_keys)
            self.record(len(plan.decode), most, duration_s, slots)
            return

        if self._is_adaptive:
            # The nodes of a tree that is a chain are numbered along it.
            nodes = [
                (num_planned, output.accepted_nodes or range(1, output.num_accepted + 1))
                for num_planned, output in rows
            ]
            self._trees.record(nodes)
            self._record_duration(len(plan.decode), most, duration_s)

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
        if self._is_adaptive:
            self._chains.record(slots)
            self._record_duration(num_slots, num_draft_tokens, duration_s)

    def _record_views(
        self, plan: StepPlan, num_draft_tokens: int, duration_s: float, num_keys: int
    ) -> float | None:
        """Learn the costs of partial verification from a round. Returns its seconds if it was a whole one."""
        num_run = next(choice for choice in self._choices if choice >= num_draft_tokens)
        bucket = self._costs.bucket(len(plan.decode))
        if plan.verification == "partial":
            self._view_costs.record(bucket, num_run, duration_s)
        if plan.verification != "whole":
            return None

        measured = self._measured.get((bucket, num_run))
        if self._gain is not None and measured is not None:
            self._gain.record_whole(num_keys, duration_s - measured)
        return duration_s

    def _record_duration(self, num_slots: int, num_draft_tokens: int, duration_s: float | None) -> None:
        if duration_s is not None:
            # The executor runs the next larger number it has a graph for.
            num_run = next(choice for choice in self._choices if choice >= num_draft_tokens)
            self._costs.record(self._costs.bucket(num_slots), num_run, duration_s)

    def _choose(self, bucket: int, choices: Sequence[int], costs: RoundCosts) -> int:
        """Of these numbers, one that was never timed, one that is due to be tried again, or the best one."""
        untried = [choice for choice in choices if not costs.is_known(bucket, choice)]
        if untried:
            return untried[-1]

        acceptance = self._trees if self._has_trees else self._chains
        seconds = {choice: costs.seconds(bucket, choice) for choice in choices}
        tokens = {choice: acceptance.tokens_of_round(choice) for choice in choices}
        best = max(choices, key=lambda choice: tokens[choice] / seconds[choice])
        for choice in choices:
            # Time lost by such a round, in rounds of `best`: it replaces tokens / tokens of `best` of them.
            lost = seconds[choice] / seconds[best] - tokens[choice] / tokens[best]
            gap = (len(choices) - 1) * lost / PROBE_SHARE
            gap = min(max(gap, MIN_PROBE_GAP), MAX_PROBE_GAP)
            if choice != best and self._num_rounds[bucket] - self._tried_at.get((bucket, choice), 0) >= gap:
                return choice

        return best
