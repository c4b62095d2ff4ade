"""The words of a replay: payloads and constraint masks that the host writes, and results that it reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec import structs
from msgspec.structs import replace
from numpy.typing import NDArray

from drift_sdk._kernels.attention.prefill import prefill_tiles
from drift_sdk._kernels.commit import (
    FINISHED_LENGTH,
    FINISHED_STOP,
    RECORD_HEADER_WORDS,
    record_words,
)
from drift_sdk._kernels.sampling.rows import MAX_TOP
from drift_sdk._kernels.trees.tree_accept import tree_record_words
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES
from drift_sdk.execution.graph.buckets import GraphBuckets, MixedBucket, bucket_of
from drift_sdk.execution.rounds.tree_round import violation_of
from drift_sdk.results import TokenLogprobs
from drift_sdk.spec.model import BORDER
from drift_sdk.steps import PrefillChunk, SlotOutput, StepPlan, TokenConstraint

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
    layout = buckets.prefill_layout(num_rows)
    token, slot, position = payload[layout.rows].reshape(3, num_rows)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    _fill_tiles(chunks, buckets.tile_rows, payload[layout.tiles])
    if buckets.has_states:
        _fill_runs(chunks, buckets.max_chunks, payload[layout.runs])
    return num_rows


def without_last_tokens(chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
    """The chunks of a mixed step, in which the last tokens of prompts are rows of the round. Chunks of a last
    token alone become empty."""
    return [
        replace(chunk, token_ids=chunk.token_ids[:-1], next_token_id=chunk.token_ids[-1])
        if chunk.is_last
        else chunk
        for chunk in chunks
    ]


def fill_mixed(
    buckets: GraphBuckets, plan: StepPlan, hits: Collection[int], bucket: MixedBucket, payload: Words
) -> None:
    """Write the payload of a mixed step: chunks, decode rows, and the prompts that end.

    hits: slots whose chunk is led by a row of the draft: the first one after a prefix hit, for instance.
    """
    layout, chunks = buckets.mixed_layout(bucket), without_last_tokens(plan.prefill)
    token, slot, position = payload[layout.rows].reshape(3, bucket.size)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    _fill_tiles(chunks, buckets.mixed_attention(bucket).tile_rows, payload[layout.tiles])
    if buckets.has_states:
        _fill_runs(chunks, buckets.mixed_chunks(bucket), payload[layout.runs])
    if layout.hits.stop > layout.following.start:
        _fill_following(chunks, hits, payload[layout.following], payload[layout.hits])
    slots, max_drafts = payload[layout.slots].reshape(2, bucket.num_slots)
    slots[:] = -1
    max_drafts[:] = 0
    num_decode = len(plan.decode)
    slots[:num_decode] = [row.slot for row in plan.decode]
    max_drafts[:num_decode] = [row.num_draft_tokens for row in plan.decode]
    for place, chunk in enumerate(chunk_ends(plan.prefill), num_decode):
        slots[place] = chunk.slot
        row = bucket.num_rows + place * (bucket.num_drafts + 1)
        token[row], slot[row] = chunk.token_ids[-1], chunk.slot
        position[row] = chunk.start + len(chunk.token_ids) - 1


def chunk_ends(chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
    """The chunks that end their prompts."""
    return [chunk for chunk in chunks if chunk.is_last]


def _fill_rows(chunks: Sequence[PrefillChunk], token: Words, slot: Words, position: Words) -> None:
    for chunk, first in zip(chunks, first_rows(chunks), strict=False):
        rows = slice(first, first + len(chunk.token_ids))
        token[rows] = chunk.token_ids
        slot[rows] = chunk.slot
        position[rows] = np.arange(chunk.start, chunk.start + len(chunk.token_ids))


def _fill_tiles(chunks: Sequence[PrefillChunk], tile_rows: int, words: Words) -> None:
    sizes = [(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in chunks if chunk.token_ids]
    prefill_tiles(sizes, tile_rows, words.reshape(-1, 4))


def _fill_runs(chunks: Sequence[PrefillChunk], max_chunks: int, words: Words) -> None:
    """Write the runs of chunks and the places of their checkpoints, as `PromptRuns` has them."""
    runs, places = words[: 4 * max_chunks].reshape(max_chunks, 4), words[4 * max_chunks :]
    runs[:] = -1
    places[:] = -1
    for index, (chunk, first) in enumerate(zip(chunks, first_rows(chunks), strict=False)):
        runs[index] = chunk.slot, chunk.start, first, len(chunk.token_ids)
        for position, place in chunk.checkpoints:
            places[first // BORDER + index + position // BORDER - chunk.start // BORDER - 1] = place


def _fill_following(
    chunks: Sequence[PrefillChunk], hits: Collection[int], following: Words, hit_rows: Words
) -> None:
    """Write the token after each row (-1: it is sampled), and the rows that follow prefix hits."""
    following[:] = -1
    hit_rows[:] = -1
    for index, (chunk, first) in enumerate(zip(chunks, first_rows(chunks), strict=False)):
        if not chunk.token_ids:
            continue

        last = first + len(chunk.token_ids) - 1
        following[first:last] = chunk.token_ids[1:]
        following[last] = -1 if chunk.next_token_id is None else chunk.next_token_id
        if chunk.slot in hits:
            hit_rows[index] = first


def fill_draft_extend(
    buckets: GraphBuckets, chunks: Sequence[PrefillChunk], hits: Collection[int], payload: Words
) -> int:
    """Write the payload of the step that updates the drafter after a prefill step, and return its bucket.

    hits: slots whose chunk is led by a row of the draft: the first one after a prefix hit, for instance.
    """
    num_rows = bucket_of(buckets.prefill, first_rows(chunks)[-1])
    token, slot, position, following = payload[: 4 * num_rows].reshape(4, num_rows)
    slot[:] = -1
    _fill_rows(chunks, token, slot, position)
    hit_rows = payload[4 * num_rows : buckets.draft_extend_words(num_rows)]
    _fill_following(chunks, hits, following, hit_rows)
    return num_rows


def fill_slots(buckets: GraphBuckets, slots: Sequence[int], values: Sequence[int], payload: Words) -> int:
    """Write slots, then a value for each slot, and return the bucket. The rest of the slots is -1."""
    size = bucket_of(buckets.decode, len(slots))
    payload[: len(slots)] = slots
    if len(slots) < size:
        payload[len(slots) : size] = -1
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


FINISH: dict[int, Literal["stop", "length"]] = {FINISHED_STOP: "stop", FINISHED_LENGTH: "length"}


def outputs(
    words: Words, rows_per_slot: int, slots: Sequence[int], num_logprobs: Mapping[int, int]
) -> Iterator[SlotOutput]:
    """An output for each of a replay's `slots`.

    words: the replay's results. rows_per_slot: rows of each slot in the replay. num_logprobs: by slot, how
    many of the most likely tokens it reports; slots that report none are missing.
    """
    size = record_words(rows_per_slot)
    records = words[: len(slots) * size].reshape(-1, size)
    # One conversion for all slots: iterating a list of numbers is much cheaper than an array or many lists.
    headers = records[:, :RECORD_HEADER_WORDS].T.tolist()
    rows = records[:, RECORD_HEADER_WORDS:].reshape(-1, 2 + 2 * MAX_TOP)
    tokens = rows[:, 0].tolist()
    firsts = range(0, len(tokens), rows_per_slot)
    for slot, first, num_tokens, finish, num_drafted, num_accepted, is_ngram in zip(
        slots, firsts, *headers, strict=True
    ):
        end = first + num_tokens
        num_top = num_logprobs.get(slot)
        logprobs = None
        if num_top is not None:
            logprobs = tuple(_logprobs(row, num_top) for row in rows[first:end])
        yield SlotOutput(
            token_ids=tuple(tokens[first:end]),
            finish=FINISH[finish] if finish else None,
            logprobs=logprobs,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            is_ngram=bool(num_drafted and is_ngram),
        )


def tree_outputs(
    words: Words,
    num_trees: int,
    slots: Sequence[int],
    num_logprobs: Mapping[int, int],
    *,
    has_checks: bool,
) -> Iterator[SlotOutput]:
    """An output for each of `slots` of a round of `num_trees` trees, which was checked or not; the rest as of
    `outputs`."""
    first = num_trees * record_words(PATH_ENTRIES)
    paths = words[first : first + len(slots) * PATH_ENTRIES].reshape(-1, PATH_ENTRIES)[:, 1:].tolist()
    flags = [0] * len(slots)
    if has_checks:
        first = tree_record_words(num_trees)
        flags = words[first : first + len(slots)].tolist()
    for output, path, flag in zip(
        outputs(words, PATH_ENTRIES, slots, num_logprobs), paths, flags, strict=True
    ):
        nodes = tuple(node for node in path if node >= 0)
        if flag:
            # A slot that took no part in the round ends with an error, whatever its token is.
            token_ids = output.token_ids or (0,)
            output = structs.replace(output, token_ids=token_ids, violation=violation_of(flag))
        yield structs.replace(output, accepted_nodes=nodes) if nodes else output


def _logprobs(row: Words, num_top: int) -> TokenLogprobs:
    """row: a token's words as `record_words` lays them out."""
    values = row.view(np.float32)
    ids = row[2 : 2 + num_top].tolist()
    top = zip(ids, values[2 + MAX_TOP : 2 + MAX_TOP + num_top].tolist(), strict=True)
    return TokenLogprobs(token_id=int(row[0]), logprob=float(values[1]), top=tuple(top))
