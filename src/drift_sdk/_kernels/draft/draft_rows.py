"""What a draft computes: its rows, the tiles of their attention, their input, and the state that it keeps.

The rows that a draft computes once their tokens are known: of a round, and of a prompt's chunks.

The row that pairs the feature of position p with the token of position p + 1 is counted at the token's place:
its position here is p + 1.

The rows of drafts in one pass that are made from the newest token alone: it is the anchor, and a mask stands
for each token after it. A row's position is the token's own.

Grid of these kernels (tiles of rows,): a program owns TILE_ROWS rows. Bytes: 24 to 36 a row; the time is
that of a launch.

Programmatic dependent launch: all wait for their producers before their first read and, being short, let
their dependents start right after that.

The tiles of a draft's prefill attention, made on the device.

`prefill_tiles` makes the same kind of table on the host. A tile is a run of one slot's rows that a program of
the attention owns. It ends with its slot's rows, and where the row's index is a multiple of the tile's size.
The tiles of chunks stand in falling order of their rows: of a long chunk, those that see most keys come
first. Before them stand tiles of one row each, of the single rows; behind them unused tiles, of slot -1.

Grid (ceil(N / TILE_ROWS) + 1,): program p owns the tiles that start in rows p * TILE_ROWS on; the last
program owns the single rows' tiles and the unused ones. Every program counts the tiles of all N rows, to know
where its own stand: 8 bytes a row, from L2. All values are integers, so no order of summation matters.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

The input of a draft's first layer: the next token's embedding beside the feature, each normalised.

Features that end a KV block are stored beside the block on the way, and those after a prefix hit are loaded
from there.

Grid (rows,): a program owns a row, and keeps it in registers: PADDED_COLUMNS is the whole row. Partial sums
are added slice by slice, in order, then rounded to the storage type. A norm's sum of squares is in the order
of Triton's reduction, which PADDED_COLUMNS and `norm_warps` fix, so a row's bits depend only on that row.
Bytes: a row of the embedding and NUM_SLICES rows of fp32, or one of the storage type, in; three out.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

The output of each slot's last row, which a draft keeps from one step to the next.

Grid (rows,): a program owns a row, and copies it if the next row is of another slot. Bytes: a row in and a
row out for each slot of the step.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.prefill import NUM_FIELDS, TILE_FIELDS
from drift_sdk._kernels.launch.arguments import cdiv, check_rows, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import NormKind, inverse_rms, norm_warps, weigh

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


@kernel(do_not_specialize=["num_rows", "mask_token", "first_kv_slot"])
def _anchor_rows(
    row_slot_ptr,  # [B * ROWS_PER_SLOT] int32
    row_token_ptr,  # [B * ROWS_PER_SLOT] int32
    row_position_ptr,  # [B * ROWS_PER_SLOT] int32
    draft_slot_ptr,  # [R] int32, written
    draft_token_ptr,  # [R] int32, written
    draft_position_ptr,  # [R] int32, written
    last_seen_ptr,  # [R] int32, written
    kv_slot_ptr,  # [R] int64, written
    num_rows,  # R = B * DRAFT_ROWS
    mask_token,
    first_kv_slot,
    ROWS_PER_SLOT: tl.constexpr,
    DRAFT_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    source, number = row // DRAFT_ROWS * ROWS_PER_SLOT, row % DRAFT_ROWS
    # A slot that drafts has a row for its first draft.
    slot = tl.load(row_slot_ptr + source + 1, mask=is_row, other=-1)
    is_live = slot >= 0
    newest = tl.load(row_token_ptr + source, mask=is_live & (number == 0), other=-1)
    token = tl.where(is_live & (number > 0), mask_token, newest)
    position = tl.load(row_position_ptr + source, mask=is_live, other=0) + number
    tl.store(draft_slot_ptr + row, slot, mask=is_row)
    tl.store(draft_token_ptr + row, token, mask=is_row)
    tl.store(draft_position_ptr + row, position, mask=is_row)
    tl.store(last_seen_ptr + row, position + (DRAFT_ROWS - 1), mask=is_row)
    tl.store(kv_slot_ptr + row, row.to(tl.int64) + first_kv_slot, mask=is_row)


def anchor_rows(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    num_masks: int,
    mask_token: int,
    first_kv_slot: int,
) -> None:
    """Write the rows (slot, token, position, last seen, KV slot) [B * (num_masks + 1)] of anchors and masks.

    row_slot, row_token, row_position [B * T] int32, T of 2 or more: a round's rows, of each slot the newest
    token first. out, written: int32, but for KV slots, which are int64. A slot without a second row drafts
    nothing, and its rows get slot -1. KV slots ascend from first_kv_slot on. Last seen is num_masks behind
    the position, so that no row of the draft lies behind it, and a window of num_masks more begins as the
    row's own does. Raises ValueError for another shape or type.
    """
    num_rows = out[0].shape[0]
    num_slots = num_rows // (num_masks + 1)
    rows_per_slot = row_slot.shape[0] // max(num_slots, 1)
    if num_rows % (num_masks + 1) or rows_per_slot < 2:
        found = f"{num_rows} rows with {num_masks} masks each, of a round's {row_slot.shape[0]} rows"
        raise ValueError(f"{found}: expected an anchor and masks for each slot, and two rows of it or more")

    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_slots * rows_per_slot,), torch.int32)

    *columns, kv_slot = out
    for name, column in zip(("slot", "token", "position", "last_seen"), columns, strict=True):
        check_tensor(name, column, (num_rows,), torch.int32)

    check_tensor("kv_slot", kv_slot, (num_rows,), torch.int64)
    _anchor_rows[(cdiv(num_rows, TILE_ROWS),)](
        row_slot,
        row_token,
        row_position,
        *out,
        num_rows,
        mask_token,
        first_kv_slot,
        ROWS_PER_SLOT=rows_per_slot,
        DRAFT_ROWS=num_masks + 1,
        TILE_ROWS=TILE_ROWS,
        PDL=uses_pdl(),
        **launch_options(),
    )


def _check_out(out: tuple[Tensor, Tensor, Tensor], num_rows: int) -> None:
    for name, tensor in zip(("slot", "token", "position"), out, strict=True):
        check_tensor(name, tensor, (num_rows,), torch.int32)


CHUNK_ROWS = 1024
"""Rows, or tiles of single rows, that a program reads at a time: 4 a thread of 8 warps."""


def num_draft_tiles(num_rows: int, num_chunks: int, tile_rows: int) -> int:
    """The number of tiles to make room for: those of num_rows rows in at most num_chunks chunks, each of
    which may add one that is not full, and of as many single rows."""
    return -(-num_rows // tile_rows) + 2 * num_chunks


@device_function
def _find_starts(
    row_slot_ptr,  # [N + C] int32
    row,  # indices of rows
    num_rows,  # N
    TILE_ROWS: tl.constexpr,
):
    """(slots of these rows, whether each row starts a tile)."""
    slot = tl.load(row_slot_ptr + row, mask=row < num_rows, other=-1)
    before = tl.load(row_slot_ptr + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
    return slot, (slot >= 0) & ((slot != before) | (row % TILE_ROWS == 0))


@kernel
def _draft_tiles(
    row_slot_ptr,  # [N + C] int32
    row_position_ptr,  # [N + C] int32
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32, written
    num_rows,  # N
    num_single,  # C
    num_tiles,
    TILE_ROWS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(N / TILE_ROWS) + 1,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    program = tl.program_id(0)
    first_row = program * TILE_ROWS
    # Tiles of all rows, and of the rows before this program's; zeros as tensors, changed in the loop.
    num_used = first_row * 0
    num_before = first_row * 0
    for first in range(0, num_rows, CHUNK_ROWS):
        row = first + tl.arange(0, CHUNK_ROWS)
        _, is_start = _find_starts(row_slot_ptr, row, num_rows, TILE_ROWS)
        num_used += tl.sum(is_start.to(tl.int32))
        num_before += tl.sum((is_start & (row < first_row)).to(tl.int32))

    if program < tl.num_programs(0) - 1:
        row = first_row + tl.arange(0, TILE_ROWS)
        slot, is_start = _find_starts(row_slot_ptr, row, num_rows, TILE_ROWS)
        other = tl.reshape(row, (1, TILE_ROWS))
        other_slot, is_other_start = _find_starts(row_slot_ptr, other, num_rows, TILE_ROWS)
        is_earlier = other < row[:, None]
        rank = num_before + tl.sum((is_other_start & is_earlier).to(tl.int32), axis=1)
        size = tl.sum(((other_slot == slot[:, None]) & (is_earlier == 0)).to(tl.int32), axis=1)
        tile_ptr = tiles_ptr + (num_single + num_used - 1 - rank) * NUM_FIELDS
        tl.store(tile_ptr, slot, mask=is_start)
        tl.store(tile_ptr + 1, row, mask=is_start)
        tl.store(tile_ptr + 2, size, mask=is_start)
        tl.store(tile_ptr + 3, tl.load(row_position_ptr + row, mask=is_start, other=0), mask=is_start)
    else:
        for first in range(0, num_tiles, CHUNK_ROWS):
            tile = first + tl.arange(0, CHUNK_ROWS)
            is_single = tile < num_single
            row = num_rows + tile
            tile_ptr = tiles_ptr + tile * NUM_FIELDS
            slot = tl.load(row_slot_ptr + row, mask=is_single, other=-1)
            is_unused = (tile >= num_single + num_used) & (tile < num_tiles)
            tl.store(tile_ptr, slot, mask=is_single | is_unused)
            tl.store(tile_ptr + 1, row, mask=is_single)
            tl.store(tile_ptr + 2, row * 0 + 1, mask=is_single)
            position = tl.load(row_position_ptr + row, mask=is_single, other=0)
            tl.store(tile_ptr + 3, position, mask=is_single)


def draft_tiles(
    row_slot: Tensor, row_position: Tensor, tiles: Tensor, *, num_single: int, tile_rows: int
) -> None:
    """Write the tiles of rows [N + C] to tiles [num_draft_tiles, TILE_FIELDS].

    The first N rows are chunks, runs of a slot's consecutive positions, at most C of them; rows of slot -1
    are in no tile. The last C = num_single rows have a tile each, of slot -1 if the row has none. tile_rows:
    rows of a tile, a power of two. Fields as of `prefill_tiles`: slot, first row, number of rows, position of
    the first row; other fields of unused tiles are not written. All int32.

    Raises ValueError for another shape or type.
    """
    num_rows = row_slot.shape[0] - num_single
    num_tiles = num_draft_tiles(num_rows, num_single, tile_rows)
    check_tensor("row_slot", row_slot, (num_rows + num_single,), torch.int32)
    check_tensor("row_position", row_position, (num_rows + num_single,), torch.int32)
    check_tensor("tiles", tiles, (num_tiles, TILE_FIELDS), torch.int32)
    _draft_tiles[(cdiv(num_rows, tile_rows) + 1,)](
        row_slot,
        row_position,
        tiles,
        num_rows,
        num_single,
        num_tiles,
        TILE_ROWS=tile_rows,
        CHUNK_ROWS=CHUNK_ROWS,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )


Residual = Literal["feature", "normed", "zeros"]
"""What the residual stream begins with: the feature, the feature after its norm, or zeros, to which something
is added."""


@device_function
def _exchange_block_feature(
    feature,  # [PADDED_COLUMNS]: the row's, if it is given
    row_position_ptr,  # [R] int32
    block_table_ptr,  # [S, max_blocks] int32
    block_features_ptr,  # [num_blocks, SIZE], read or written
    row,
    slot,
    column,  # [PADDED_COLUMNS]
    is_live,
    is_given,
    block_table_stride,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The row's feature: its block's where it is not given; one that ends a block is stored beside the
    block."""
    position = tl.load(row_position_ptr + row)
    entry_ptr = block_table_ptr + slot.to(tl.int64) * block_table_stride + (position - 1) // BLOCK_SIZE
    block = tl.load(entry_ptr, mask=is_live, other=0).to(tl.int64)
    block_feature_ptr = block_features_ptr + block * SIZE + column
    is_kept = is_live & (is_given == 0)
    kept = tl.load(block_feature_ptr, mask=column < tl.where(is_kept, SIZE, 0), other=0.0)
    feature = tl.where(is_kept, kept, feature)
    ends_block = is_live & is_given & (position % BLOCK_SIZE == 0)
    tl.store(block_feature_ptr, feature, mask=column < tl.where(ends_block, SIZE, 0))
    return feature


@kernel(do_not_specialize=["num_features"])
def _draft_inputs(
    # The rows.
    row_slot_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    features_ptr,  # [F, SIZE], or partial sums [NUM_SLICES, F, SIZE] fp32
    # The weights.
    embedding_ptr,  # [V, SIZE]
    token_norm_ptr,  # [SIZE]
    feature_norm_ptr,  # [SIZE]
    # The results.
    hidden_ptr,  # [R, SIZE], written; may be features_ptr
    inputs_ptr,  # [R, 2 * SIZE], written
    # The KV blocks.
    block_table_ptr,  # [S, max_blocks] int32
    block_features_ptr,  # [num_blocks, SIZE], read and written; or None
    # Sizes.
    eps,
    num_features,  # F
    features_slice_stride,  # elements from a slice of features to the next
    block_table_stride,  # elements from a row of block_table to the next
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # SIZE as a power of two
    BLOCK_SIZE: tl.constexpr,  # tokens of a KV block
    NUM_SLICES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM_KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). Longer than other kernels by its signature."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_COLUMNS)
    is_column = column < SIZE
    slot = tl.load(row_slot_ptr + row)
    token = tl.load(row_token_ptr + row).to(tl.int64)
    is_live = tl.minimum(token, slot) >= 0
    is_given = row < num_features
    dtype = hidden_ptr.dtype.element_ty
    slice_ptr = features_ptr + row * SIZE + column
    is_loaded = column < tl.where(is_live & is_given, SIZE, 0)
    total = tl.load(slice_ptr, mask=is_loaded, other=0.0).to(tl.float32)
    for index in tl.static_range(1, NUM_SLICES):
        total += tl.load(slice_ptr + index * features_slice_stride, mask=is_loaded, other=0.0)

    feature = total.to(dtype)
    if block_features_ptr is not None:
        feature = _exchange_block_feature(
            feature,
            row_position_ptr,
            block_table_ptr,
            block_features_ptr,
            row,
            slot,
            column,
            is_live,
            is_given,
            block_table_stride,
            SIZE,
            BLOCK_SIZE,
        )

    wide = feature.to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    weights = tl.load(feature_norm_ptr + column, mask=is_column, other=0.0)
    normed = weigh(tl.where(is_live, scaled, 0.0), weights, NORM_KIND)
    tl.store(inputs_ptr + row * 2 * SIZE + SIZE + column, normed, mask=is_column)
    if RESIDUAL == "normed":
        feature = normed
    elif RESIDUAL == "zeros":
        feature = tl.zeros_like(feature)
    tl.store(hidden_ptr + row * SIZE + column, feature, mask=is_column)

    is_loaded = column < tl.where(is_live, SIZE, 0)
    wide = tl.load(embedding_ptr + token * SIZE + column, mask=is_loaded, other=0.0).to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    weights = tl.load(token_norm_ptr + column, mask=is_column, other=0.0)
    normed = weigh(tl.where(is_live, scaled, 0.0), weights, NORM_KIND)
    tl.store(inputs_ptr + row * 2 * SIZE + column, normed, mask=is_column)


def draft_inputs(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    features: Tensor,
    embedding: Tensor,
    token_norm: Tensor,
    feature_norm: Tensor,
    hidden: Tensor,
    inputs: Tensor,
    *,
    eps: float,
    residual: Residual,
    norm_kind: NormKind = "rounded",
    block_table: Tensor,
    block_features: Tensor | None = None,
    block_size: int = 1,
) -> None:
    """inputs [R, 2 H] = (rms_norm(embedding[row_token]), rms_norm(feature)); hidden [R, H] = what `residual`
    says. Both are zeros for rows with a negative slot or token.

    row_slot, row_token, row_position [R] int32: the feature is that of position row_position - 1.
    features: [F, H] in the storage type, or fp32 partial sums [num_slices, F, H], added in order and rounded;
    hidden may be the same tensor. embedding [V, H], token_norm and feature_norm [H]. eps, norm_kind: of both
    norms.
    block_features [num_blocks, H], with block_table [S, max_blocks] int32 and block_size tokens a block:
    features of rows below F that end a block are written there, and those of rows from F on are read there.
    Without it F must be R.

    Raises ValueError for another shape, type or layout.
    """
    num_rows, size = hidden.shape
    num_slices = features.shape[0] if features.dim() == 3 else 1
    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)

    _check_features(features, hidden, inputs, block_features)
    check_tensor("embedding", embedding, (embedding.shape[0], size), hidden.dtype)
    check_tensor("token_norm", token_norm, (size,), hidden.dtype)
    check_tensor("feature_norm", feature_norm, (size,), hidden.dtype)
    check_rows("block_table", block_table, block_table.shape, torch.int32)
    _draft_inputs[(num_rows,)](
        row_slot,
        row_token,
        row_position,
        features,
        embedding,
        token_norm,
        feature_norm,
        hidden,
        inputs,
        block_table,
        block_features,
        eps,
        features.shape[-2],
        features.stride(0) if features.dim() == 3 else 0,
        block_table.stride(0),
        SIZE=size,
        PADDED_COLUMNS=next_power_of_2(size),
        BLOCK_SIZE=block_size,
        NUM_SLICES=num_slices,
        RESIDUAL=residual,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


def _check_features(features: Tensor, hidden: Tensor, inputs: Tensor, block_features: Tensor | None) -> None:
    (num_rows, size), dtype = hidden.shape, hidden.dtype
    num_features = features.shape[-2]
    if features.dim() == 3:
        check_tensor("features", features, (features.shape[0], num_features, size), torch.float32)
    else:
        check_tensor("features", features, (num_features, size), dtype)

    if num_features > num_rows or (block_features is None and num_features != num_rows):
        raise ValueError(f"features: {num_features} rows: expected {num_rows}, or fewer with block_features")

    check_tensor("hidden", hidden, (num_rows, size), dtype)
    check_tensor("inputs", inputs, (num_rows, 2 * size), dtype)
    if block_features is not None:
        check_tensor("block_features", block_features, (block_features.shape[0], size), dtype)


@kernel
def _keep_last_rows(
    row_slot_ptr,  # [R] int32
    output_ptr,  # [R, SIZE]
    state_ptr,  # [S, SIZE], written
    num_rows,  # R
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # SIZE as a power of two
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    following = tl.load(row_slot_ptr + row + 1, mask=row + 1 < num_rows, other=-1)
    if (slot >= 0) & (slot != following):
        column = tl.arange(0, PADDED_COLUMNS)
        is_column = column < SIZE
        values = tl.load(output_ptr + row.to(tl.int64) * SIZE + column, mask=is_column, other=0.0)
        tl.store(state_ptr + slot.to(tl.int64) * SIZE + column, values, mask=is_column)


def keep_last_rows(row_slot: Tensor, output: Tensor, state: Tensor) -> None:
    """state[slot] = the last of the slot's rows of output, for state [S, H] and output [R, H] of one type.

    row_slot [R] int32: a slot's rows stand together; -1: padding. Raises ValueError for another shape, type
    or layout.
    """
    num_rows, size = output.shape
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("output", output, (num_rows, size), state.dtype)
    check_tensor("state", state, (state.shape[0], size), state.dtype)
    _keep_last_rows[(num_rows,)](
        row_slot,
        output,
        state,
        num_rows,
        SIZE=size,
        PADDED_COLUMNS=next_power_of_2(size),
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )
