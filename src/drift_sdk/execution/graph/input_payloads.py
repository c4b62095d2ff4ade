"""Payloads and constraint masks that the host writes for a replay."""

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
    "fill_mixed",
    "fill_slots",
    "first_rows",
]

Words = NDArray[np.int32]

Constraints = Mapping[int, TokenConstraint]
"""By slot, of the slots that have a constraint."""


def first_rows(chunks: Sequence[PrefillChunk]) -> list[int]:
    """The first row of each chunk in the step, then the end of the last chunk's rows."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk.token_ids))

    return ends


def fill_chunks(buckets: GraphBuckets, chunks: Sequence[PrefillChunk], payload: Words) -> int:
    """Write the payload of a prefill step and return its bucket."""
    ends = first_rows(chunks)
    num_rows = bucket_of(buckets.prefill, ends[-1])
    token, slot, position = payload[: 3 * num_rows].reshape(3, num_rows)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    _fill_tiles(chunks, buckets.tile_rows, payload[3 * num_rows : buckets.prefill_words(num_rows)])
    return num_rows


def fill_mixed(
    buckets: GraphBuckets,
    chunks: Sequence[PrefillChunk],
    slots: Sequence[int],
    bucket: tuple[int, int],
    payload: Words,
) -> None:
    """Write the payload of a mixed step of `bucket`: chunks, and slots with a row each."""
    num_rows, num_slots = bucket
    size = num_rows + num_slots
    token, slot, position = payload[: 3 * size].reshape(3, size)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    tiles, rest = np.split(payload[3 * size : buckets.mixed_words(*bucket)], [-2 * num_slots])
    _fill_tiles(chunks, buckets.mixed_tile_rows, tiles)
    rest[:num_slots] = -1
    rest[: len(slots)] = slots
    rest[num_slots:] = 0


def _fill_rows(chunks: Sequence[PrefillChunk], token: Words, slot: Words, position: Words) -> None:
    for chunk, first in zip(chunks, first_rows(chunks), strict=False):
        rows = slice(first, first + len(chunk.token_ids))
        token[rows] = chunk.token_ids
        slot[rows] = chunk.slot
        position[rows] = np.arange(chunk.start, chunk.start + len(chunk.token_ids))


def _fill_tiles(chunks: Sequence[PrefillChunk], tile_rows: int, words: Words) -> None:
    sizes = [(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in chunks]
    prefill_tiles(sizes, tile_rows, words.reshape(-1, 4))


def fill_draft_extend(
    buckets: GraphBuckets, chunks: Sequence[PrefillChunk], hits: Sequence[int], payload: Words
) -> int:
    """Write the payload of the step that updates the drafter after a prefill step, and return its bucket.

    hits: slots whose chunk is the first after a prefix hit.
    """
    ends = first_rows(chunks)
    num_rows = bucket_of(buckets.prefill, ends[-1])
    token, slot, position, following = payload[: 4 * num_rows].reshape(4, num_rows)
    hit_rows = payload[4 * num_rows : buckets.draft_extend_words(num_rows)]
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


def fill_slots(buckets: GraphBuckets, slots: Sequence[int], values: Sequence[int], payload: Words) -> int:
    """Write slots, then a value for each slot, and return the bucket. The rest of the slots is -1."""
    size = bucket_of(buckets.decode, len(slots))
    payload[:size] = -1
    payload[: len(slots)] = slots
    payload[size : size + len(values)] = values
    return size


def fill_masks(constraints: Constraints, slots: Sequence[int], masks: Words) -> None:
    """Write the tokens allowed next for each of `slots` that has a constraint to its row of masks [B, W]."""
    for place, slot in enumerate(slots if constraints else ()):
        constraint = constraints.get(slot)
        if constraint is not None:
            masks[place] = constraint.masks(())[0]


def fill_draft_masks(constraints: Constraints, slots: Sequence[int], tokens: Words, masks: Words) -> None:
    """Write the tokens allowed after every row of a round to masks [B * T, W], for slots with a constraint.

    tokens [B * T]: each slot's newest token and the drafts after it; -1: no draft.
    """
    rows_per_slot = len(tokens) // len(slots)
    drafts_of = tokens.reshape(-1, rows_per_slot)[:, 1:].tolist()
    for place, (slot, drafts) in enumerate(zip(slots, drafts_of, strict=True)):
        constraint = constraints.get(slot)
        if constraint is not None:
            drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
            first = place * rows_per_slot
            masks[first : first + len(drafts) + 1] = constraint.masks(drafts)
