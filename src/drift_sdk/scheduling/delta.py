from __future__ import annotations

from msgspec import Struct

from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import SlotOutput

__all__ = ["Delta"]


class Delta(Struct, frozen=True, gc=False):
    """What one committed step added to a sequence. `num_planned_drafts`: None for a first token, which no
    draft can precede."""

    sequence: Sequence
    output: SlotOutput
    num_planned_drafts: int | None = None
