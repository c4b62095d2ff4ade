"""Decode rounds as the host starts them: one replay, or two if it must say what may follow each draft."""

from __future__ import annotations

from collections.abc import Sequence

from drift_sdk.execution.device.ring import Results, Ring
from drift_sdk.execution.device.slot_table import NO_UPDATES, Pairs
from drift_sdk.execution.graph.buckets import GraphBuckets, bucket_of
from drift_sdk.execution.graph.captured_graphs import CapturedGraphs
from drift_sdk.execution.graph.input_payloads import Constraints, fill_draft_masks, fill_masks, fill_slots
from drift_sdk.execution.stages import StageMarks, forward_stage
from drift_sdk.steps import DecodeRow

__all__ = ["launch_round"]


def launch_round(
    graphs: CapturedGraphs,
    layout: GraphBuckets,
    ring: Ring,
    stages: StageMarks,
    rows: Sequence[DecodeRow],
    constraints: Constraints,
    updates: Pairs,
) -> tuple[int, Results]:
    """Start a round of `rows`; how many rows a slot it has, and its records.

    What a constraint allows behind a draft only the host knows. Only where a constrained slot drafts, this
    waits until the drafts are there.
    """
    slots = [row.slot for row in rows]
    drafts = [row.num_draft_tokens for row in rows]
    num_drafts = bucket_of(layout.drafts, max(drafts))
    entry = ring.acquire(updates)
    size = fill_slots(layout, slots, drafts, ring.payload(entry))
    shape = size, num_drafts
    is_asked = any(
        row.num_draft_tokens > 0 and row.slot in constraints for row in (rows if constraints else ())
    )
    with stages(forward_stage(num_drafts)):
        if is_asked:
            ring.start(entry, graphs.draft[shape])
            tokens = ring.wait(entry)[: len(rows) * (num_drafts + 1)]
            fill_draft_masks(constraints, slots, tokens, ring.draft_masks.numpy())
            entry = ring.acquire(NO_UPDATES)
            ring.start(entry, graphs.verify[shape])
        else:
            fill_masks(constraints, slots, ring.mask(entry))
            ring.start(entry, graphs.decode[shape])
    return num_drafts + 1, ring.results(entry)
