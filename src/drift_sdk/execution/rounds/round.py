"""A decode round on the device: whole, or in two halves between which the host sees the drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from drift_sdk._kernels.slots.gather_rows import gather_rows
from drift_sdk._kernels.slots.input_ring import show_drafts
from drift_sdk._kernels.slots.slot_columns import SlotState
from drift_sdk.execution.device.ring import Ring
from drift_sdk.execution.forward.decode import DecodeForward, Rows
from drift_sdk.execution.rounds.drafter import RoundDrafter
from drift_sdk.execution.rounds.sample_commit import SampleCommit
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks, forward_stage

__all__ = ["RoundSteps"]


@dataclass(frozen=True, slots=True)
class RoundSteps:
    """What a round of B slots with K drafts each, so T = K + 1 rows a slot, does: each method is a step to
    capture.

    slots, max_drafts [B] int32: the round's payload, brought by `enter`: slots, then how many drafts each may
    have. rows [B * T]: whoever verifies them finds them where they were drafted.
    """

    num_drafts: int
    enter: Callable[[int], None]
    slots: Tensor
    max_drafts: Tensor
    state: SlotState
    ring: Ring
    rows: Rows
    forward: DecodeForward
    head: SampleCommit
    drafter: RoundDrafter | None
    stages: StageMarks = NO_STAGE_MARKS

    def whole(self) -> None:
        self._draft()
        self._verify(has_draft_masks=False)

    def draft(self) -> None:
        """The first half: it leaves the drafted tokens in the ring, see `show_drafts`."""
        self._draft()
        ring, rows = self.ring, self.rows
        show_drafts(rows.slot, rows.token, ring.output, ring.current, ring.next_index)

    def verify(self) -> None:
        """The second half, next after the first. Slots under a constraint have a mask for every row."""
        self.enter(0)
        self._verify(has_draft_masks=True)

    def _draft(self) -> None:
        rows, num_slots = self.rows, self.slots.shape[0]
        self.enter(2 * num_slots)
        gather_rows(self.slots, self.max_drafts, self.state, rows.slot, rows.token, rows.position)
        if self.drafter is not None:
            self.drafter.propose(rows, num_slots=num_slots, num_draft_tokens=self.num_drafts)

    def _verify(self, *, has_draft_masks: bool) -> None:
        forward, head = self.forward, self.head
        with self.stages(forward_stage(self.num_drafts)):
            forward.run()
        head.run(forward.normed, has_draft_masks=has_draft_masks)
        if self.drafter is not None:
            with self.stages("draft_extend"):
                self.drafter.draft_extend(
                    self.rows,
                    num_slots=self.slots.shape[0],
                    num_draft_tokens=self.num_drafts,
                    aux_hidden=forward.aux_hidden,
                    hidden=forward.hidden,
                    chosen=head.chosen,
                    emitted=head.emitted,
                )
