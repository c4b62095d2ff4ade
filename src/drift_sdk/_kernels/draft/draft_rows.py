"""The rows that a draft computes once their tokens are known: of a round, and of a prompt's chunks.

The row that pairs the feature of position p with the token of position p + 1 is counted at the token's place:
its position here is p + 1.

Grid of both kernels (tiles of rows,): a program owns TILE_ROWS rows. Bytes: 24 to 32 a row; the time is
that of a launch.

Programmatic dependent launch: both wait for their producers before their first read and, being short, let
their dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv

__all__ = ["chunk_rows", "round_rows"]

TILE_ROWS = 256
"""Rows of a program: two a thread of 4 warps."""


@kernel(do_not_specialize=["num_rows"])
def _round_rows(
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    chosen_ptr,  # [R] int32
    emitted_ptr,  # [B] int32
    draft_slot_ptr,  # [R] int32, written
    draft_token_ptr,  # [R] int32, written
    draft_position_ptr,  # [R] int32, written
    num_rows,  # R
    ROWS_PER_SLOT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    is_emitted = row % ROWS_PER_SLOT < tl.load(emitted_ptr + row // ROWS_PER_SLOT, mask=is_row, other=0)
    slot = tl.load(row_slot_ptr + row, mask=is_emitted, other=-1)
    token = tl.load(chosen_ptr + row, mask=is_emitted, other=-1)
    position = tl.load(row_position_ptr + row, mask=is_emitted, other=0)
    tl.store(draft_slot_ptr + row, tl.where(token < 0, -1, slot), mask=is_row)
    tl.store(draft_token_ptr + row, token, mask=is_row)
    tl.store(draft_position_ptr + row, position + 1, mask=is_row)


@kernel
def _chunk_rows(
    row_slot_ptr,  # [N] int32
    row_token_ptr,  # [N] int32
    row_position_ptr,  # [N] int32
    next_token_ptr,  # [N] int32; -1: the slot's last token
    hits_ptr,  # [C] int32: rows; -1: none
    last_token_ptr,  # [S] int32
    draft_slot_ptr,  # [N + C] int32, written
    draft_token_ptr,  # [N + C] int32, written
    draft_position_ptr,  # [N + C] int32, written
    num_rows,  # N
    num_hits,  # C
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N + C,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_hit = (row >= num_rows) & (row < num_rows + num_hits)
    source = tl.load(hits_ptr + row - num_rows, mask=is_hit, other=-1)
    source = tl.where(row < num_rows, row, source)
    slot = tl.load(row_slot_ptr + source, mask=source >= 0, other=-1)
    is_live = slot >= 0
    # The row before a hit pairs with the hit's own token; all others with the token that follows.
    own = tl.load(row_token_ptr + source, mask=is_live & is_hit, other=-1)
    following = tl.load(next_token_ptr + source, mask=is_live & (is_hit == 0), other=-1)
    sampled = tl.load(last_token_ptr + slot, mask=is_live & (following < 0), other=-1)
    token = tl.where(is_hit, own, tl.where(following < 0, sampled, following))
    position = tl.load(row_position_ptr + source, mask=is_live, other=0)
    is_row = row < num_rows + num_hits
    tl.store(draft_slot_ptr + row, tl.where(token < 0, -1, slot), mask=is_row)
    tl.store(draft_token_ptr + row, token, mask=is_row)
    tl.store(draft_position_ptr + row, tl.where(is_hit, position, position + 1), mask=is_row)


def round_rows(
    row_slot: Tensor,
    row_position: Tensor,
    chosen: Tensor,
    emitted: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the rows (slot, token, position) [R] that a draft computes of a round, those that were emitted.

    row_slot, row_position [R]: the round's rows, R / B for each of B slots. chosen [R]: the token behind each
    row. emitted [B]: of slot b the first emitted[b] rows were emitted; 0 for padding. out, written: the token
    is the chosen one, the position that of this token; rows that were not emitted get slot -1. All int32.
    Raises ValueError for another shape or type.
    """
    (num_rows,), (num_slots,) = row_slot.shape, emitted.shape
    if num_rows % num_slots:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {num_slots}")

    for name, tensor in (("row_slot", row_slot), ("row_position", row_position), ("chosen", chosen)):
        check_tensor(name, tensor, (num_rows,), torch.int32)

    check_tensor("emitted", emitted, (num_slots,), torch.int32)
    _check_out(out, num_rows)
    _round_rows[(cdiv(num_rows, TILE_ROWS),)](
        row_slot,
        row_position,
        chosen,
        emitted,
        *out,
        num_rows,
        ROWS_PER_SLOT=num_rows // num_slots,
        TILE_ROWS=TILE_ROWS,
        PDL=uses_pdl(),
        **launch_options(),
    )


def chunk_rows(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    next_token: Tensor,
    hits: Tensor,
    last_token: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the rows (slot, token, position) [N + C] that a draft computes of a prefill step.

    They are the step's rows [N], and the row before each of hits [C]. next_token [N]: the token that follows
    each row; -1: the slot's last_token [S]. hits: rows whose predecessor the draft has to compute too; -1:
    none. out, written: the N rows, then the C predecessors, slot -1 for padding; the token is the one that
    the feature is paired with, the position that of the token. All int32. Raises ValueError for another shape
    or type.
    """
    (num_rows,), (num_hits,) = row_slot.shape, hits.shape
    for name, tensor in (
        ("row_slot", row_slot),
        ("row_token", row_token),
        ("row_position", row_position),
        ("next_token", next_token),
    ):
        check_tensor(name, tensor, (num_rows,), torch.int32)

    check_tensor("hits", hits, (num_hits,), torch.int32)
    check_tensor("last_token", last_token, last_token.shape, torch.int32)
    _check_out(out, num_rows + num_hits)
    _chunk_rows[(cdiv(num_rows + num_hits, TILE_ROWS),)](
        row_slot,
        row_token,
        row_position,
        next_token,
        hits,
        last_token,
        *out,
        num_rows,
        num_hits,
        TILE_ROWS=TILE_ROWS,
        PDL=uses_pdl(),
        **launch_options(),
    )


def _check_out(out: tuple[Tensor, Tensor, Tensor], num_rows: int) -> None:
    for name, tensor in zip(("slot", "token", "position"), out, strict=True):
        check_tensor(name, tensor, (num_rows,), torch.int32)
