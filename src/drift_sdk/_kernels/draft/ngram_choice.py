"""n-grams in the place of a draft model's tokens, by a score that each sequence has of them.

`_take_ngrams`, grid (slots,): a program owns a slot of a round for which a model has drafted. It takes what
`search_ngrams` has found, keeps both drafts, and replaces the model's by the n-gram if the slot's score is
not negative. `_score_ngrams`, grid (slots,): after the round, a program counts the tokens of both drafts of
its slot that were right, and moves the score. All values are integers, so no order of summation matters.

Bytes: of either some words a row.

Programmatic dependent launch: both wait for their producers before their first read, and let their dependents
start right after that.

Reference: execution.eager.hybrid_drafter.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor, check_tensors
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.draft.ngram import found_tokens, num_searchers

__all__ = ["score_ngrams", "take_ngrams"]


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
