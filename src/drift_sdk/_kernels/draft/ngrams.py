"""Prompt look-up on the device: drafts are the tokens behind an earlier occurrence of the sequence's end.

Two launches propose. `_search`, grid (slots, searchers): a program owns every P-th chunk of CHUNK_TOKENS
places of its slot's history, and finds the longest run of tokens there that also ends the history, the
latest of equally long ones. `_propose`, grid (slots,): a program owns a slot, takes the best of what
its searchers found, and writes the tokens behind it. A third, `_append`, grid (tiles of rows,), keeps the
history. All values are integers, so no order of summation matters.

Bytes: 4 for each token of the history, then up to MAX_LENGTH times that from L1; of a proposal and of an
append a few words a row.

Programmatic dependent launch: all wait for their producers before their first read, and let their dependents
start right after that.

Reference of the proposals: `execution.ngram_history`.

n-grams in the place of a draft model's tokens, by a score that each sequence has of them.

`_take_ngrams`, grid (slots,): a program owns a slot of a round for which a model has drafted. It takes what
`search_ngrams` has found, keeps both drafts, and replaces the model's by the n-gram if the slot's score is
not negative. `_score_ngrams`, grid (slots,): after the round, a program counts the tokens of both drafts of
its slot that were right, and moves the score. All values are integers, so no order of summation matters.

Bytes: of either some words a row.

Programmatic dependent launch: both wait for their producers before their first read, and let their dependents
start right after that.

Reference: execution.eager.drafters.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_rows, check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

SEARCH_TOKENS = 1024
"""Places in the history that a program searches at a time: 8 a thread of 4 warps."""
MAX_SEARCHERS = 32
"""Most programs that search a history: with two chunks each they cover 65,536 tokens before any has a third,
and a single sequence is shared by 32 multiprocessors."""
APPEND_ROWS = 256
"""Rows of a program that appends: two a thread of 4 warps."""
END_BITS = tl.constexpr(32)
"""A find is one int64: the run's length above these bits, the place behind its end below. So the larger find
is the longer run, and the later one of runs as long. 0: nothing was found."""
END_MASK = tl.constexpr(2**31 - 1)
"""The place of a find: positions are int32 and not negative."""


@kernel
def _search(
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    history_ptr,  # [S, max tokens] int32
    found_ptr,  # [R / ROWS_PER_SLOT, P] int64, written
    history_stride,  # elements from a slot's history to the next
    ROWS_PER_SLOT: tl.constexpr,
    MIN_LENGTH: tl.constexpr,
    MAX_LENGTH: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R / ROWS_PER_SLOT, P). Writes the best find in this program's chunks."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    slot_index, searcher = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + slot_index * ROWS_PER_SLOT)
    length = tl.load(row_position_ptr + slot_index * ROWS_PER_SLOT) + 1
    length = tl.where(slot >= 0, length, 0)
    tokens_ptr = history_ptr + slot.to(tl.int64) * history_stride
    newest = tl.load(row_token_ptr + slot_index * ROWS_PER_SLOT)
    best = tl.zeros([CHUNK_TOKENS], tl.int64)
    for first in range(searcher * CHUNK_TOKENS, length, tl.num_programs(1) * CHUNK_TOKENS):
        # A run of n tokens before `end` equals the last n; something follows it, so `end` is in the history.
        end = first + tl.arange(0, CHUNK_TOKENS)
        is_equal = end < length
        run = tl.zeros([CHUNK_TOKENS], tl.int64)
        for back in tl.static_range(1, MAX_LENGTH + 1):
            is_equal &= end >= back
            # The newest token is not in the history yet.
            last = tl.load(tokens_ptr + length - back, mask=length >= back, other=-1) if back > 1 else newest
            is_equal &= tl.load(tokens_ptr + end - back, mask=is_equal, other=-2) == last
            run += is_equal.to(tl.int64)

        best = tl.maximum(best, tl.where(run >= MIN_LENGTH, (run << END_BITS) + end, 0))

    tl.store(found_ptr + slot_index * tl.num_programs(1) + searcher, tl.max(best))


@device_function
def found_tokens(
    row_slot_ptr,  # as of `_propose`, like the next ones
    row_position_ptr,
    row_token_ptr,
    history_ptr,
    found_ptr,
    history_stride,
    NUM_SEARCHERS: tl.constexpr,
    PADDED_SEARCHERS: tl.constexpr,
    ROWS_PER_SLOT: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
):
    """Return the rows of a program's slot but the first, a mask of those that exist, their slots, and the
    tokens found for them (-1: none). All [PADDED_ROWS]."""
    slot_index = tl.program_id(0)
    slot = tl.load(row_slot_ptr + slot_index * ROWS_PER_SLOT)
    length = tl.load(row_position_ptr + slot_index * ROWS_PER_SLOT) + 1
    searcher = tl.arange(0, PADDED_SEARCHERS)
    is_searcher = searcher < NUM_SEARCHERS
    best = tl.max(tl.load(found_ptr + slot_index * NUM_SEARCHERS + searcher, mask=is_searcher, other=0))
    end = tl.where(best > 0, best & END_MASK, length)
    draft = tl.arange(0, PADDED_ROWS)
    row = slot_index * ROWS_PER_SLOT + 1 + draft
    is_draft = draft + 1 < tl.where(slot >= 0, ROWS_PER_SLOT, 0)
    own_slot = tl.load(row_slot_ptr + row, mask=is_draft, other=-1)
    is_proposed = (own_slot >= 0) & (end + draft < length)
    is_newest = is_proposed & (end + draft == length - 1)
    place_ptr = history_ptr + slot.to(tl.int64) * history_stride + end + draft
    token = tl.load(place_ptr, mask=is_proposed & (is_newest == 0), other=-1)
    token = tl.where(is_newest, tl.load(row_token_ptr + slot_index * ROWS_PER_SLOT), token)
    return row, is_draft, own_slot, token


@kernel
def _propose(
    row_slot_ptr,  # [R] int32, written for rows that are drafted
    row_position_ptr,  # [R] int32
    row_token_ptr,  # [R] int32, written for rows that are drafted
    history_ptr,  # [S, max tokens] int32
    found_ptr,  # [R / ROWS_PER_SLOT, NUM_SEARCHERS] int64
    history_stride,  # elements from a slot's history to the next
    NUM_SEARCHERS: tl.constexpr,
    PADDED_SEARCHERS: tl.constexpr,  # NUM_SEARCHERS as a power of two
    ROWS_PER_SLOT: tl.constexpr,
    PADDED_ROWS: tl.constexpr,  # ROWS_PER_SLOT as a power of two
    PDL: tl.constexpr,
):
    """Grid (R / ROWS_PER_SLOT,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, is_draft, own_slot, token = found_tokens(
        row_slot_ptr, row_position_ptr, row_token_ptr, history_ptr, found_ptr, history_stride, NUM_SEARCHERS,
        PADDED_SEARCHERS, ROWS_PER_SLOT, PADDED_ROWS,
    )  # fmt: skip
    tl.store(row_token_ptr + row, token, mask=is_draft)
    tl.store(row_slot_ptr + row, tl.where(token >= 0, own_slot, -1), mask=is_draft)


@kernel
def _append(
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    emitted_ptr,  # [R / ROWS_PER_SLOT] int32; not read without HAS_EMITTED
    history_ptr,  # [S, max tokens] int32, written
    history_stride,  # elements from a slot's history to the next
    num_rows,  # R
    ROWS_PER_SLOT: tl.constexpr,
    HAS_EMITTED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    slot = tl.load(row_slot_ptr + row, mask=row < num_rows, other=-1)
    is_appended = slot >= 0
    if HAS_EMITTED:
        num_emitted = tl.load(emitted_ptr + row // ROWS_PER_SLOT, mask=is_appended, other=0)
        is_appended &= row % ROWS_PER_SLOT < num_emitted
    position = tl.load(row_position_ptr + row, mask=is_appended, other=0)
    token = tl.load(row_token_ptr + row, mask=is_appended, other=-1)
    tl.store(history_ptr + slot.to(tl.int64) * history_stride + position, token, mask=is_appended)


def num_searchers(max_num_tokens: int) -> int:
    """The number of programs that search a history of at most so many tokens: two chunks each, as long as
    there are fewer than MAX_SEARCHERS."""
    return min(-(-max_num_tokens // (2 * SEARCH_TOKENS)), MAX_SEARCHERS)


def search_ngrams(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    found: Tensor,
    *,
    rows_per_slot: int,
    min_length: int,
    max_length: int,
) -> None:
    """Look up the end of each sequence where it last occurred before; the first launch of `propose_ngrams`.

    found, written: the finds of each slot's searchers. Other arguments and errors as of `propose_ngrams`.
    """
    num_slots, remainder = divmod(row_slot.shape[0], rows_per_slot)
    if remainder:
        raise ValueError(f"row_slot: {row_slot.shape[0]} rows: expected a multiple of {rows_per_slot}")

    _check_rows(history, row_slot=row_slot, row_position=row_position, row_token=row_token)
    searchers = num_searchers(history.shape[1])
    check_tensor("found", found, (num_slots, searchers), torch.int64)
    _search[(num_slots, searchers)](
        row_slot,
        row_position,
        row_token,
        history,
        found,
        history.stride(0),
        ROWS_PER_SLOT=rows_per_slot,
        MIN_LENGTH=min_length,
        MAX_LENGTH=max_length,
        CHUNK_TOKENS=SEARCH_TOKENS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


def propose_ngrams(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    found: Tensor,
    *,
    rows_per_slot: int,
    min_length: int,
    max_length: int,
) -> None:
    """Draft the tokens that followed the end of the sequence when it last occurred before.

    row_slot, row_position, row_token [R] int32: `rows_per_slot` rows of each slot, the first that of its
    newest token. history [S, max tokens] int32: the token at each position before that one. found [R /
    rows_per_slot, num_searchers] int64: scratch.

    The longest run of `min_length` to `max_length` tokens is looked up that also ends the sequence, where it
    last occurred before. The tokens behind it are written to row_token of the slot's other rows, as far as
    these have a slot; rows for which there is no token get slot -1.

    Raises ValueError for another shape, type or layout.
    """
    search_ngrams(
        row_slot,
        row_position,
        row_token,
        history,
        found,
        rows_per_slot=rows_per_slot,
        min_length=min_length,
        max_length=max_length,
    )
    num_slots, searchers = found.shape
    _propose[(num_slots,)](
        row_slot,
        row_position,
        row_token,
        history,
        found,
        history.stride(0),
        NUM_SEARCHERS=searchers,
        PADDED_SEARCHERS=next_power_of_2(searchers),
        ROWS_PER_SLOT=rows_per_slot,
        PADDED_ROWS=next_power_of_2(rows_per_slot),
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def append_history(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    *,
    emitted: Tensor | None = None,
) -> None:
    """history[row_slot, row_position] = row_token, for rows [R] int32 with a slot.

    emitted [B] int32: of the R / B rows of each slot only the first so many. Raises ValueError for another
    shape, type or layout.
    """
    (num_rows,) = row_slot.shape
    _check_rows(history, row_slot=row_slot, row_position=row_position, row_token=row_token)
    num_slots = num_rows if emitted is None else emitted.shape[0]
    if num_rows % num_slots:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of emitted's {num_slots}")

    if emitted is not None:
        check_tensor("emitted", emitted, (num_slots,), torch.int32)
    _append[(cdiv(num_rows, APPEND_ROWS),)](
        row_slot,
        row_position,
        row_token,
        row_slot if emitted is None else emitted,
        history,
        history.stride(0),
        num_rows,
        ROWS_PER_SLOT=num_rows // num_slots,
        HAS_EMITTED=emitted is not None,
        TILE_ROWS=APPEND_ROWS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


def _check_rows(history: Tensor, **rows: Tensor) -> None:
    shape = rows["row_slot"].shape
    for name, tensor in rows.items():
        check_tensor(name, tensor, shape, torch.int32)
    check_rows("history", history, (history.shape[0], history.shape[1]), torch.int32)


@kernel
def _take_ngrams(
    row_slot_ptr,  # [B * ROWS_PER_SLOT] int32, written where the n-gram is taken
    row_position_ptr,  # [B * ROWS_PER_SLOT] int32
    row_token_ptr,  # [B * ROWS_PER_SLOT] int32, written where the n-gram is taken
    history_ptr,  # [S, max tokens] int32
    found_ptr,  # [B, NUM_SEARCHERS] int64
    score_ptr,  # [S] int32
    drafts_ptr,  # [2, B, ROWS_PER_SLOT] int32, written
    is_ngram_ptr,  # [B] int32, written
    history_stride,  # elements from a slot's history to the next
    NUM_SEARCHERS: tl.constexpr,
    PADDED_SEARCHERS: tl.constexpr,  # NUM_SEARCHERS as a power of two
    ROWS_PER_SLOT: tl.constexpr,
    PADDED_ROWS: tl.constexpr,  # ROWS_PER_SLOT as a power of two
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    slot_index, num_slots = tl.program_id(0), tl.num_programs(0)
    row, is_draft, own_slot, ngram = found_tokens(
        row_slot_ptr, row_position_ptr, row_token_ptr, history_ptr, found_ptr, history_stride, NUM_SEARCHERS,
        PADDED_SEARCHERS, ROWS_PER_SLOT, PADDED_ROWS,
    )  # fmt: skip
    model = tl.load(row_token_ptr + row, mask=is_draft & (own_slot >= 0), other=-1)
    draft = tl.arange(0, PADDED_ROWS)
    is_kept = draft + 1 < ROWS_PER_SLOT
    own_drafts_ptr = drafts_ptr + slot_index * ROWS_PER_SLOT + draft
    tl.store(own_drafts_ptr, ngram, mask=is_kept)
    tl.store(own_drafts_ptr + num_slots * ROWS_PER_SLOT, model, mask=is_kept)
    slot = tl.load(row_slot_ptr + slot_index * ROWS_PER_SLOT)
    score = tl.load(score_ptr + tl.maximum(slot, 0))
    # Negative if nothing was found, or if the score is.
    choice = tl.minimum(tl.max(ngram, axis=0), score)
    tl.store(is_ngram_ptr + slot_index, tl.where(choice >= 0, 1, 0))
    is_replaced = is_draft & (draft + 1 < tl.where(choice >= 0, ROWS_PER_SLOT, 0))
    tl.store(row_token_ptr + row, ngram, mask=is_replaced)
    tl.store(row_slot_ptr + row, tl.where(ngram >= 0, own_slot, -1), mask=is_replaced)


@device_function
def _num_right(
    draft_ptr,  # [ROWS_PER_SLOT] int32: the slot's
    chosen,  # [PADDED_ROWS]: tokens of the round; -2 behind the last one emitted
    ROWS_PER_SLOT: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
):
    """The number of tokens, from the first on, that a draft has in common with the round."""
    place = tl.arange(0, PADDED_ROWS)
    token = tl.load(draft_ptr + place, mask=place + 1 < ROWS_PER_SLOT, other=-1)
    return tl.min(tl.where(token == chosen, PADDED_ROWS, place), axis=0)


@kernel
def _score_ngrams(
    row_slot_ptr,  # [B * ROWS_PER_SLOT] int32
    chosen_ptr,  # [B * ROWS_PER_SLOT] int32
    emitted_ptr,  # [B] int32
    drafts_ptr,  # [2, B, ROWS_PER_SLOT] int32
    score_ptr,  # [S] int32, read and written
    UNIT: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS_PER_SLOT: tl.constexpr,
    PADDED_ROWS: tl.constexpr,  # ROWS_PER_SLOT as a power of two
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    slot_index, num_slots = tl.program_id(0), tl.num_programs(0)
    num_emitted = tl.load(emitted_ptr + slot_index)
    place = tl.arange(0, PADDED_ROWS)
    is_emitted = place < num_emitted
    chosen = tl.load(chosen_ptr + slot_index * ROWS_PER_SLOT + place, mask=is_emitted, other=-2)
    own_ptr = drafts_ptr + slot_index * ROWS_PER_SLOT
    num_ngram = _num_right(own_ptr, chosen, ROWS_PER_SLOT, PADDED_ROWS)
    num_model = _num_right(own_ptr + num_slots * ROWS_PER_SLOT, chosen, ROWS_PER_SLOT, PADDED_ROWS)
    if (num_emitted > 0) & (tl.load(own_ptr) >= 0):
        own_score_ptr = score_ptr + tl.load(row_slot_ptr + slot_index * ROWS_PER_SLOT)
        score = tl.load(own_score_ptr)
        tl.store(own_score_ptr, score + (((num_ngram - num_model) * UNIT - score) >> SHIFT))


def take_ngrams(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    found: Tensor,
    score: Tensor,
    drafts: Tensor,
    is_ngram: Tensor,
) -> None:
    """Replace the drafts of a model by n-grams for slots whose score is not negative.

    row_slot, row_position, row_token [B * T] int32, history [S, max tokens] int32, found [B, num_searchers]
    int64: as of `search_ngrams`, which has run; the rows of drafts hold the model's. score [S] int32. drafts
    [2, B, T] int32, written: of each slot the n-gram's tokens, then the model's, -1 where there is none.
    is_ngram [B] int32, written: whether the n-gram was taken. Then row_token holds it, and rows behind it get
    slot -1.

    Raises ValueError for another shape, type or layout.
    """
    num_slots, num_rows = found.shape[0], row_slot.shape[0]
    rows_per_slot = num_rows // num_slots
    check_tensors(
        (num_slots * rows_per_slot,),
        torch.int32,
        row_slot=row_slot,
        row_position=row_position,
        row_token=row_token,
    )
    check_rows("history", history, (history.shape[0], history.shape[1]), torch.int32)
    searchers = num_searchers(history.shape[1])
    check_tensor("found", found, (num_slots, searchers), torch.int64)
    check_tensor("score", score, (history.shape[0],), torch.int32)
    check_tensor("drafts", drafts, (2, num_slots, rows_per_slot), torch.int32)
    check_tensor("is_ngram", is_ngram, (num_slots,), torch.int32)
    _take_ngrams[(num_slots,)](
        row_slot,
        row_position,
        row_token,
        history,
        found,
        score,
        drafts,
        is_ngram,
        history.stride(0),
        NUM_SEARCHERS=searchers,
        PADDED_SEARCHERS=next_power_of_2(searchers),
        ROWS_PER_SLOT=rows_per_slot,
        PADDED_ROWS=next_power_of_2(rows_per_slot),
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def score_ngrams(
    row_slot: Tensor,
    chosen: Tensor,
    emitted: Tensor,
    drafts: Tensor,
    score: Tensor,
    *,
    unit: int,
    shift: int,
) -> None:
    """Move the scores of slots that had an n-gram, by the tokens of both drafts that were right.

    row_slot, chosen [B * T] int32: the round's rows, and the token behind each. emitted [B] int32: of slot b
    the first emitted[b] were emitted. drafts [2, B, T] int32: as `take_ngrams` left it. score [S] int32, read
    and written: it moves by 1 / 2**shift of its distance from `unit` times the difference of the two.

    Raises ValueError for another shape, type or layout.
    """
    _, num_slots, rows_per_slot = drafts.shape
    check_tensors((num_slots * rows_per_slot,), torch.int32, row_slot=row_slot, chosen=chosen)
    check_tensor("emitted", emitted, (num_slots,), torch.int32)
    check_tensor("drafts", drafts, drafts.shape, torch.int32)
    check_tensor("score", score, score.shape, torch.int32)
    _score_ngrams[(num_slots,)](
        row_slot,
        chosen,
        emitted,
        drafts,
        score,
        UNIT=unit,
        SHIFT=shift,
        ROWS_PER_SLOT=rows_per_slot,
        PADDED_ROWS=next_power_of_2(rows_per_slot),
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
