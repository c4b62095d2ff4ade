"""A decode round on the device: one step, or two between which the host reads the drafted tokens."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.slots.step_inputs import gather_rows, show_drafts
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.resources import DeviceResources
from drift_sdk.execution.rounds.drafter import RoundDrafter
from drift_sdk.execution.rounds.sample_commit import SampleCommit
from drift_sdk.execution.stages import forward_stage

__all__ = ["DecodeRound"]


class DecodeRound:
    """A round of B slots with K drafts each, T = K + 1 rows a slot. Each public method is a step to capture.

    Its payload: slots [B], then the most drafts of each slot [B].
    """

    def __init__(
        self,
        resources: DeviceResources,
        payload: Tensor,
        rows: Rows,
        forward: ForwardPass,
        sample_commit: SampleCommit,
        drafter: RoundDrafter | None,
    ) -> None:
        """payload [2, B] int32: slots (-1: padding) and most drafts. rows [B * T]: rows are drafted and
        verified in the same buffers."""
        self._resources, self._rows, self._forward = resources, rows, forward
        self._sample_commit, self._drafter = sample_commit, drafter
        self._slots, self._max_drafts = payload
        self._num_slots = payload.shape[1]
        self._num_drafts = rows.slot.shape[0] // self._num_slots - 1

    def whole(self) -> None:
        """Draft, verify and commit without the host."""
        self._draft()
        self._verify(has_draft_masks=False)

    def draft(self) -> None:
        """The first half of a split round: leaves the drafted tokens in the ring, see `show_drafts`."""
        self._draft()
        ring, rows = self._resources.ring, self._rows
        show_drafts(rows.slot, rows.token, ring.output, ring.current, ring.next_index)

    def verify(self) -> None:
        """The second half, the next replay after the first. Slots under a constraint have a mask for every
        row."""
        self._resources.payload.enter(0)
        self._verify(has_draft_masks=True)

    def _draft(self) -> None:
        rows, state = self._rows, self._resources.table.state
        self._resources.payload.enter(2 * self._num_slots)
        gather_rows(self._slots, self._max_drafts, state, rows.slot, rows.token, rows.position)
        if self._drafter is not None:
            self._drafter.propose(rows, num_slots=self._num_slots, num_draft_tokens=self._num_drafts)

    def _verify(self, *, has_draft_masks: bool) -> None:
        forward, sample_commit, stages = self._forward, self._sample_commit, self._resources.stages
        if self._num_drafts > 0:
            forward.share_drafts()
        with stages(forward_stage(self._num_drafts)):
            forward.run()
        sample_commit.run(forward.normed, has_draft_masks=has_draft_masks)
        if self._drafter is not None:
            with stages("draft_extend"):
                self._drafter.draft_extend(sample_commit.verified(forward.hidden_states))
