"""What the host writes for a replay: the rows of chunks, or slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from drift_sdk._kernels.attention.prefill_tiles import prefill_tiles
from drift_sdk.execution.graph.buckets import GraphBuckets, bucket_of
from drift_sdk.steps import PrefillChunk, TokenConstraint

__all__ = [
    "Constraints",
    "fill_chunks",
    "fill_draft_extend",
    "fill_draft_masks",
    "fill_masks",
    "fill_slots",
    "first_rows",
]

Words = NDArray[np.int32]

Constraints = Mapping[int, TokenConstraint]
"""By slot, of those that are under one."""


def first_rows(layout: GraphBuckets, chunks: Sequence[PrefillChunk]) -> list[int]:
    """Where each chunk begins among the rows of the step, and where the last one ends."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + layout.padded(len(chunk.token_ids)))

    return ends


def fill_chunks(layout: GraphBuckets, chunks: Sequence[PrefillChunk], payload: Words) -> int:
    """A prefill step's payload; the bucket it is for."""
    ends = first_rows(layout, chunks)
    num_rows = bucket_of(layout.prefill, ends[-1])
    token, slot, position = payload[: 3 * num_rows].reshape(3, num_rows)
    slot[:] = -1
    for chunk, first in zip(chunks, ends, strict=False):
        rows = slice(first, first + len(chunk.token_ids))
        token[rows] = chunk.token_ids
        slot[rows] = chunk.slot
        position[rows] = np.arange(chunk.start, chunk.start + len(chunk.token_ids))

    if not layout.is_exact:
        tiles = payload[3 * num_rows : layout.prefill_words(num_rows)].reshape(-1, 4)
        sizes = [(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in chunks]
        prefill_tiles(sizes, layout.tile_rows, tiles)
    return num_rows


def fill_draft_extend(
    layout: GraphBuckets, chunks: Sequence[PrefillChunk], hits: Sequence[int], payload: Words
) -> int:
    """The payload of what a drafter takes in of a prefill step; the bucket it is for.

    hits: slots whose chunk is the first behind a prefix hit.
    """
    ends = first_rows(layout, chunks)
    num_rows = bucket_of(layout.prefill, ends[-1])
    token, slot, position, following = payload[: 4 * num_rows].reshape(4, num_rows)
    hit_rows = payload[4 * num_rows : layout.follow_words(num_rows)]
    slot[:] = -1
    following[:] = -1
    hit_rows[:] = -1
    for index, (chunk, first) in enumerate(zip(chunks, ends, strict=False)):
        last = first + len(chunk.token_ids) - 1
        token[first : last + 1] = chunk.token_ids
        slot[first : last + 1] = chunk.slot
        position[first : last + 1] = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
        following[first:last] = chunk.token_ids[1:]
        following[last] = -1 if chunk.next_token_id is None else chunk.next_token_id
        if chunk.slot in hits:
            hit_rows[index] = first

    return num_rows


def fill_slots(layout: GraphBuckets, slots: Sequence[int], values: Sequence[int], payload: Words) -> int:
    """Slots, and a value for each; the bucket they are for."""
    size = bucket_of(layout.decode, len(slots))
    payload[:size] = -1
    payload[: len(slots)] = slots
    payload[size : size + len(values)] = values
    return size


def fill_masks(constraints: Constraints, slots: Sequence[int], masks: Words) -> None:
    """What slots under a constraint may say next: masks [B, W], a row each."""
    for place, slot in enumerate(slots if constraints else ()):
        constraint = constraints.get(slot)
        if constraint is not None:
            masks[place] = constraint.masks(())[0]


def fill_draft_masks(constraints: Constraints, slots: Sequence[int], tokens: Words, masks: Words) -> None:
    """The same for every row: tokens [B * T] of a round, each slot's newest and the drafts behind it (-1:
    none), and masks [B * T, W]."""
    rows_per_slot = len(tokens) // len(slots)
    drafts_of = tokens.reshape(-1, rows_per_slot)[:, 1:].tolist()
    for place, (slot, drafts) in enumerate(zip(slots, drafts_of, strict=True)):
        constraint = constraints.get(slot)
        if constraint is not None:
            drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
            first = place * rows_per_slot
            masks[first : first + len(drafts) + 1] = constraint.masks(drafts)
