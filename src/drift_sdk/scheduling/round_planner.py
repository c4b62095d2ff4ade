"""The choice of a step's decode round: its number of draft tokens, and their verification."""

from __future__ import annotations

from drift_sdk.draft_policy.policy import DraftPolicy
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.scheduling.step_builder import PlannedStep
from drift_sdk.steps import StepResult, Verification

__all__ = ["RoundPlanner"]


class RoundPlanner:
    """Chooses rounds by measured costs, and partial verification from bounds on what steps in flight do.

    A round over views needs room for the rows that it may accept among the pending ones, and views: of a
    sequence that is longer than a view, those of a refresh since its admission, and since its last whole
    round, whose rows no view has room for. While it is not used, rows that are pending are refreshed at once.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._layout = config.view_layout
        self._is_crowded = False
        self._policy = (
            DraftPolicy(
                config.draft_choices,
                config.round_costs,
                is_adaptive=config.is_draft_adaptive,
                has_trees=config.max_tree_depth is not None,
                view_costs=config.view_costs,
            )
            if config.draft_choices
            else None
        )

    def choose(self, running: list[Sequence]) -> tuple[int, Verification]:
        """The most draft tokens of a row of the next step, and its verification."""
        if self._policy is None:
            return 0, "whole"

        if self._layout is None:
            return self._policy.num_draft_tokens(len(running)), "whole"

        decoding = [sequence for sequence in running if not sequence.is_prefilling]
        self._is_crowded = len(decoding) > self._layout.max_sequences
        lengths = [len(sequence.token_ids) for sequence in decoding]
        if not self._can_use_views(decoding) or not self._policy.wants_views(lengths):
            is_pending = any(sequence.max_pending_tokens for sequence in decoding)
            return self._policy.num_draft_tokens(len(running)), "refresh" if is_pending else "whole"

        number = self._policy.num_draft_tokens(len(running), over_views=True)
        has_room = all(self._has_view(sequence, number + 1) for sequence in decoding)
        return number, "partial" if has_room else "refresh"

    def leaves_out(self, sequence: Sequence, verification: Verification) -> bool:
        """Return True if the step just chosen leaves out a sequence, because too many decode together for a
        refresh: it takes those with pending rows, for which there is room."""
        return self._is_crowded and verification == "refresh" and not sequence.max_pending_tokens

    def may_draft(self, sequence: Sequence, verification: Verification) -> bool:
        """Return True if a sequence may draft in a step of this verification: a refresh is one replay, in
        which a constraint gives the mask of one token alone."""
        return verification == "whole" or sequence.constraint is None

    def launch(self, sequence: Sequence, verification: Verification, step_id: int, most: int) -> None:
        """Count a planned row of a sequence that emits at most so many tokens."""
        if verification == "partial":
            sequence.max_pending_tokens += most
        else:
            sequence.has_views = verification == "refresh"
            if sequence.has_views:
                sequence.max_pending_tokens, sequence.refreshed_in = 0, step_id

    def complete(self, sequence: Sequence, step_id: int, most: int, num_emitted: int) -> None:
        """Count a committed row of a step over views."""
        if step_id > sequence.refreshed_in:
            sequence.max_pending_tokens -= most - num_emitted

    def observe(self, step: PlannedStep, result: StepResult) -> None:
        """Learn from the result of a step."""
        if self._policy is not None and step.plan.decode:
            has_views = self._layout is not None
            num_keys = sum([len(sequence.token_ids) for sequence in step.decode]) if has_views else 0
            self._policy.observe(step.plan, result, num_keys=num_keys)

    def _can_use_views(self, decoding: list[Sequence]) -> bool:
        """Return True if views may be used for sequences that decode together: there are not too many, one of
        them is longer than a view, and none forbids drafts or has a constraint."""
        if self._is_crowded or any(
            sequence.max_draft_tokens == 0 or sequence.constraint is not None for sequence in decoding
        ):
            return False

        return any(self._is_long(sequence) for sequence in decoding)

    def _has_view(self, sequence: Sequence, most: int) -> bool:
        """Return True if the sequence has a view, and room for `most` more pending rows."""
        assert self._layout is not None
        has_room = sequence.max_pending_tokens + most <= self._layout.refresh_tokens
        return has_room and (sequence.has_views or not self._is_long(sequence))

    def _is_long(self, sequence: Sequence) -> bool:
        """Return True if the sequence may be longer than a view when the next step begins."""
        assert self._layout is not None
        return len(sequence.token_ids) + sequence.max_in_flight_tokens > self._layout.capacity
