"""Pending rows: the tokens that partial rounds have accepted, whose keys and values a refresh computes again.

`refresh_rows` puts a sequence's pending rows before the rows of its round, so that all of them are
consecutive. `note_round` adds the rows that a partial round has accepted to the pending ones; after a
refresh, none are pending, and it notes how many blocks views leave out from then on.

Grid of `refresh_rows`: (sequences,), of `note_round`: (slots of the round,). A program owns the rows of one
of them. Bytes: 12 for each row in, 12 for each row out. The time is that of a launch.

Dependent launch: both wait for their producers before their first read and, being short, let their dependents
start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.retrieval.view import Retrieval
from drift_sdk.partial_verification import ViewLayout

__all__ = ["note_round", "refresh_rows"]


@kernel
def _refresh_rows(
    round_slot_ptr,  # [B * ROUND_ROWS] int32; -1: padding row
    round_token_ptr,  # as round_slot
    round_position_ptr,  # as round_slot
    pending_ptr,  # [S] int32
    pending_token_ptr,  # [S, MOST_PENDING] int32
    row_slot_ptr,  # [B * ROWS] int32, written
    row_token_ptr,  # as row_slot
    row_position_ptr,  # as row_slot
    ROUND_ROWS: tl.constexpr,  # of a sequence
    ROWS: tl.constexpr,  # of a sequence, with pending rows
    PADDED_ROWS: tl.constexpr,  # ROWS as a power of two
    MOST_PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    sequence = tl.program_id(0)
    first = sequence * ROUND_ROWS
    row = tl.arange(0, PADDED_ROWS)
    depth = row - (ROWS - ROUND_ROWS)  # in the round; negative for pending rows
    is_row = row < ROWS
    is_of_round = is_row & (depth >= 0)
    newest_slot = tl.load(round_slot_ptr + first)
    newest_position = tl.load(round_position_ptr + first)
    pending = tl.load(pending_ptr + newest_slot, mask=newest_slot >= 0, other=0)
    place = tl.minimum(pending, MOST_PENDING) + depth
    is_pending = is_row & (depth < 0) & (place >= 0)
    token = tl.load(round_token_ptr + first + depth, mask=is_of_round, other=-1)
    own_tokens_ptr = pending_token_ptr + newest_slot.to(tl.int64) * MOST_PENDING
    token = tl.where(is_pending, tl.load(own_tokens_ptr + place, mask=is_pending, other=-1), token)
    slot = tl.load(round_slot_ptr + first + depth, mask=is_of_round, other=-1)
    slot = tl.where(is_pending, newest_slot, slot)
    out = sequence * ROWS + row
    tl.store(row_slot_ptr + out, slot, mask=is_row)
    tl.store(row_token_ptr + out, token, mask=is_row)
    tl.store(row_position_ptr + out, tl.maximum(newest_position + depth, 0), mask=is_row)


@kernel
def _note_round(
    row_slot_ptr,  # [B * ROUND_ROWS] int32; -1: padding row
    row_token_ptr,  # as row_slot
    row_position_ptr,  # as row_slot
    emitted_ptr,  # [B] int32
    pending_ptr,  # [S] int32, read and written
    pending_token_ptr,  # [S, MOST_PENDING] int32, written
    dropped_ptr,  # [S] int32, written by a refresh
    IS_REFRESH: tl.constexpr,
    ROUND_ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,  # ROUND_ROWS as a power of two
    MOST_PENDING: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (slot of the round)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    index = tl.program_id(0)
    first = index * ROUND_ROWS
    slot = tl.load(row_slot_ptr + first)
    if slot >= 0:
        if IS_REFRESH:
            position = tl.load(row_position_ptr + first)
            window_block = tl.maximum(position + 1 - WINDOW_TOKENS, 0) // BLOCK_SIZE
            tl.store(dropped_ptr + slot, tl.maximum(window_block - NUM_KEPT, 0))
            tl.store(pending_ptr + slot, 0)
        else:
            pending = tl.load(pending_ptr + slot)
            emitted = tl.load(emitted_ptr + index)
            depth = tl.arange(0, PADDED_ROWS)
            is_kept = (depth < emitted) & (pending + depth < MOST_PENDING)
            token = tl.load(row_token_ptr + first + depth, mask=is_kept, other=0)
            tokens_ptr = pending_token_ptr + slot.to(tl.int64) * MOST_PENDING
            tl.store(tokens_ptr + pending + depth, token, mask=is_kept)
            tl.store(pending_ptr + slot, tl.minimum(pending + emitted, MOST_PENDING))


def refresh_rows(
    round_rows: tuple[Tensor, Tensor, Tensor],
    retrieval: Retrieval,
    out: tuple[Tensor, Tensor, Tensor],
    layout: ViewLayout,
    *,
    num_sequences: int,
) -> None:
    """Write the rows of a refresh: of each sequence the pending rows, then those of the round.

    round_rows: slot, token and position [B * T] each, T rows for each of B sequences, the first of which is
    the newest token's. out [B * T'], written: as round_rows, T' rows a sequence. Rows that a sequence does
    not need come first and have slot -1. All int32.
    Raises ValueError for another shape or type, and where T' is less than T and the most pending rows.
    """
    retrieval.check(layout)
    (num_round_rows,), (num_rows,) = round_rows[0].shape, out[0].shape
    rows_each, round_rows_each = num_rows // num_sequences, num_round_rows // num_sequences
    if rows_each < round_rows_each + layout.refresh_tokens:
        least = round_rows_each + layout.refresh_tokens
        raise ValueError(f"out: {rows_each} rows a sequence: expected at least {least}")

    for name, column, written in zip(("slot", "token", "position"), round_rows, out, strict=True):
        check_tensors((num_sequences * round_rows_each,), torch.int32, **{f"round_{name}": column})
        check_tensors((num_sequences * rows_each,), torch.int32, **{f"row_{name}": written})
    _refresh_rows[(num_sequences,)](
        *round_rows,
        retrieval.pending,
        retrieval.pending_token,
        *out,
        ROUND_ROWS=round_rows_each,
        ROWS=rows_each,
        PADDED_ROWS=next_power_of_2(rows_each),
        MOST_PENDING=layout.refresh_tokens,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def note_round(
    rows: tuple[Tensor, Tensor, Tensor],
    emitted: Tensor,
    retrieval: Retrieval,
    layout: ViewLayout,
    *,
    is_refresh: bool,
) -> None:
    """Note a round that has been committed.

    rows: slot, token and position [B * T] of the round's rows. emitted [B]: tokens that each slot emitted.
    After a partial round, a slot's first emitted[b] rows are pending; after a refresh none is.
    All int32. Raises ValueError for another shape or type.
    """
    retrieval.check(layout)
    (num_rows,), (num_slots,) = rows[0].shape, emitted.shape
    rows_per_slot = num_rows // num_slots
    check_tensors((num_slots * rows_per_slot,), torch.int32, slot=rows[0], token=rows[1], position=rows[2])
    check_tensors((num_slots,), torch.int32, emitted=emitted)
    _note_round[(num_slots,)](
        *rows,
        emitted,
        retrieval.pending,
        retrieval.pending_token,
        retrieval.dropped,
        IS_REFRESH=is_refresh,
        ROUND_ROWS=rows_per_slot,
        PADDED_ROWS=next_power_of_2(rows_per_slot),
        MOST_PENDING=layout.refresh_tokens,
        WINDOW_TOKENS=layout.window_tokens,
        BLOCK_SIZE=layout.block_size,
        NUM_KEPT=layout.num_kept,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
