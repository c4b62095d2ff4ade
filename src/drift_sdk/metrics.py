"""What an engine tells about itself."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["EngineStats"]


class EngineStats(Struct, frozen=True, kw_only=True):
    """A snapshot after a step.

    Sequences: running (in a slot), waiting (for a slot, preempted ones included), queued (never started).
    Blocks: free ones include cached blocks that nobody uses now. `step_seconds` sums the device time of
    `num_steps` steps since the start.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    num_free_slots: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
