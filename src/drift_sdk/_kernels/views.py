"""Views of sequences for partial verification: block tables of a part of their blocks, one for each layer.

A view has the sequence's first blocks, the retrieved ones in ascending order, and those of the window (see
`ViewLayout`). Attention reads it like any block table, with the positions that keys have in the view.

Grid: (layers, sequences). A program makes the view of a sequence in a layer; those of layer 0 also write the
positions of the sequence's rows. Bytes: 8 for each block of a view, and 8 a row.

Dependent launch: the kernel waits for its producers before its first read and, being short, lets its
dependents start right after that. Attention reads views before it waits, several kernels later.

The share of attention that blocks of keys get from the rows of a round, by which blocks are retrieved.

    score[r, h, p] = query[r, h] . key[p] * scale                      for positions p <= position[r]
    share[n] = sum over rows r, heads h of sum over p in block n of softmax(score[r, h])[p]

Two kernels. `_sum_blocks` sums each block by itself: log2 of the sum of exp2(score). `_add_shares` divides by
the sums of all blocks, those that are always read included, so that a head that attends to these alone counts
little.

Grid of `_sum_blocks`: (KV heads, sequences, splits). Program (h, s, i) takes every n-th tile of keys of the
sequence, for all its rows and all query heads of the group. Bytes: the keys, once for all rows and heads of a
group. Grid of `_add_shares`: (KV heads, sequences). Bytes: the sums, twice.

The order of sums over blocks is that of tiles; no bit of a token depends on it, only which blocks are read.

Dependent launch: both wait for their producers before their first read. `_add_shares` lets its dependents
start right after that.

The blocks of sequences that get the largest shares of attention, in ascending order.

Grid: (sequences,). A program adds the shares of a sequence's heads, in their order, finds the smallest share
that is still selected, bit by bit (shares are not negative, so their bits are in their order), and writes the
numbers of the blocks above it; of equal shares at the border the first blocks. Bytes: 4 for each block and
head, and 4 for each block selected.

Dependent launch: the kernel waits for its producers before its first read and lets its dependents start right
after that.

Pending rows: the tokens that partial rounds have accepted, whose keys and values a refresh computes again.

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
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import padded_size
from drift_sdk._kernels.attention.softmax import LOG2_E
from drift_sdk._kernels.launch.arguments import (
    check_power_of_two,
    check_tensor,
    check_tensors,
    next_power_of_2,
)
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk.speculation import MAX_VIEW_BLOCK_SIZE, ViewLayout


class Retrieval(Struct, frozen=True):
    """The state of partial verification of S slots, int32.

    dropped [S]: blocks that the slot's views leave out; 0: none. pending [S]: rows whose keys and values
    partial rounds have written: those before the newest token. pending_token [S, refresh_tokens]: their
    tokens, in order. selected [L, S, num_retrieved]: of each layer, the numbers of retrieved blocks in the
    sequence, ascending; undefined where none are left out.
    """

    dropped: Tensor
    pending: Tensor
    pending_token: Tensor
    selected: Tensor

    def check(self, layout: ViewLayout) -> None:
        """Raises ValueError for a tensor of another shape or type, or one that is not contiguous."""
        num_layers, num_slots, _ = self.selected.shape
        check_tensors((num_slots,), torch.int32, dropped=self.dropped, pending=self.pending)
        check_tensor("pending_token", self.pending_token, (num_slots, layout.refresh_tokens), torch.int32)
        check_tensor("selected", self.selected, (num_layers, num_slots, layout.num_retrieved), torch.int32)


@kernel(do_not_specialize=["num_slots", "max_blocks"])
def _view_blocks(
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32
    block_table_ptr,  # [S, max_blocks] int32
    dropped_ptr,  # [S] int32
    selected_ptr,  # [L, S, NUM_RETRIEVED] int32
    view_ptr,  # [L, S, NUM_BLOCKS] int32, written for the rows' slots
    view_position_ptr,  # [R] int32, written
    num_slots,  # S
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,  # ROWS_PER_SEQUENCE as a power of two
    BLOCK_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_RETRIEVED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,  # NUM_BLOCKS as a power of two
    PDL: tl.constexpr,
):
    """Program (layer, sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    layer, sequence = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + sequence * ROWS_PER_SEQUENCE)
    is_live = slot >= 0
    dropped = tl.load(dropped_ptr + slot, mask=is_live, other=0)
    place = tl.arange(0, PADDED_BLOCKS)
    end = tl.where(dropped > 0, NUM_SINKS + NUM_RETRIEVED, 0)
    is_retrieved = (place >= NUM_SINKS) & (place < end)
    own_row = layer.to(tl.int64) * num_slots + slot
    selected = tl.load(selected_ptr + own_row * NUM_RETRIEVED + place - NUM_SINKS, mask=is_retrieved, other=0)
    following = tl.where(place < NUM_SINKS, place, place + dropped)
    index = tl.where(is_retrieved, selected, following)
    is_block = (place < tl.where(is_live, NUM_BLOCKS, 0)) & (index < max_blocks)
    block = tl.load(block_table_ptr + slot.to(tl.int64) * max_blocks + index, mask=is_block, other=0)
    tl.store(view_ptr + own_row * NUM_BLOCKS + place, block, mask=is_block)
    if layer == 0:
        depth = tl.arange(0, PADDED_ROWS)
        is_row = depth < ROWS_PER_SEQUENCE
        row = sequence * ROWS_PER_SEQUENCE + depth
        position = tl.load(row_position_ptr + row, mask=is_row, other=0)
        tl.store(view_position_ptr + row, position - dropped * BLOCK_SIZE, mask=is_row)


def view_blocks(
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    retrieval: Retrieval,
    view: Tensor,
    view_position: Tensor,
    layout: ViewLayout,
    *,
    rows_per_sequence: int,
) -> None:
    """Write the views of the slots of rows [R], and the rows' positions in them.

    row_slot, row_position [R]: `rows_per_sequence` consecutive rows a sequence, all behind the window's first
    key; a sequence whose first row has slot -1 has no view. block_table [S, max_blocks]. view [L, S,
    layout.num_blocks], written: entries beyond the block table are left as they are. view_position [R],
    written. All int32. Raises ValueError for another shape or type.
    """
    (num_rows,), (num_slots, max_blocks) = row_slot.shape, block_table.shape
    num_layers, num_blocks = retrieval.selected.shape[0], layout.num_blocks
    retrieval.check(layout)
    check_tensor("block_table", block_table, (num_slots, max_blocks), torch.int32)
    check_tensors(
        (num_rows,),
        torch.int32,
        row_slot=row_slot,
        row_position=row_position,
        view_position=view_position,
    )
    check_tensor("view", view, (num_layers, num_slots, num_blocks), torch.int32)
    _view_blocks[(num_layers, num_rows // rows_per_sequence)](
        row_slot,
        row_position,
        block_table,
        retrieval.dropped,
        retrieval.selected,
        view,
        view_position,
        num_slots,
        max_blocks,
        ROWS_PER_SEQUENCE=rows_per_sequence,
        PADDED_ROWS=next_power_of_2(rows_per_sequence),
        BLOCK_SIZE=layout.block_size,
        NUM_SINKS=layout.num_sinks,
        NUM_RETRIEVED=layout.num_retrieved,
        NUM_BLOCKS=num_blocks,
        PADDED_BLOCKS=next_power_of_2(num_blocks),
        PDL=uses_pdl(),
        num_warps=2,
        **launch_options(),
    )


TILE_KEYS = MAX_VIEW_BLOCK_SIZE
"""Keys of a tile: the most tokens of a block."""
TILE_BLOCKS = 64
"""Blocks that `_add_shares` takes at once."""
PROGRAMS_PER_MULTIPROCESSOR = 4


@kernel(do_not_specialize=["max_blocks"])
def _sum_blocks(
    query_ptr,  # [B * QUERY_ROWS, num_heads, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], storage type
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [B * ROWS] int32; -1: padding row
    row_position_ptr,  # [B * ROWS] int32
    sums_ptr,  # [B, NUM_KV_HEADS, max_blocks, ROWS * GROUP_SIZE] fp32, written: log2 of sums
    scale,  # of scores, times log2(e)
    max_blocks,
    QUERY_ROWS: tl.constexpr,  # of a sequence: the last ROWS of them are scored
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # ROWS * GROUP_SIZE as a power of two, 16 or more
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, sequence, split). A third of its lines are arguments."""
    wait_for_producers(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = TILE_KEYS // BLOCK_SIZE
    query_row = tl.arange(0, TILE_ROWS)
    is_row = query_row < ROWS * GROUP_SIZE
    row = sequence * ROWS + query_row // GROUP_SIZE
    slot = tl.load(row_slot_ptr + sequence * ROWS)
    is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1) >= 0
    last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1)
    num_keys = tl.max(last_position, 0) + 1
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    source = sequence * QUERY_ROWS + QUERY_ROWS - ROWS + query_row // GROUP_SIZE
    query_index = (source * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
    query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
    queries = tl.load(query_ptrs, mask=is_live[:, None] & is_dim[None, :], other=0.0)
    key = tl.arange(0, TILE_KEYS)
    block = tl.arange(0, BLOCKS)
    table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
    own_sums_ptr = sums_ptr + (sequence * NUM_KV_HEADS + head).to(tl.int64) * max_blocks * (ROWS * GROUP_SIZE)
    num_tiles = (num_keys + TILE_KEYS - 1) // TILE_KEYS
    for tile in range(tl.program_id(2), num_tiles, tl.num_programs(2)):
        position = tile * TILE_KEYS + key
        is_key = position < num_keys
        place = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        cache_row = (place * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        key_ptrs = keys_ptr + cache_row[:, None] * HEAD_DIM + dim[None, :]
        keys = tl.load(key_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        score = tl.dot(queries, keys.T, input_precision="ieee") * scale
        score = tl.where(position[None, :] <= last_position[:, None], score, float("-inf"))
        by_block = tl.reshape(score, (TILE_ROWS, BLOCKS, BLOCK_SIZE))
        maximum = tl.max(by_block, 2)
        reference = tl.where(maximum == float("-inf"), 0.0, maximum)
        total = tl.sum(tl.exp2(by_block - reference[:, :, None]), 2)
        is_empty = total == 0.0
        sums = reference + tl.log2(tl.where(is_empty, 1.0, total))
        index = tile * BLOCKS + block
        sum_ptrs = own_sums_ptr + index[None, :] * (ROWS * GROUP_SIZE) + query_row[:, None]
        is_sum = is_row[:, None] & (index * BLOCK_SIZE < num_keys)[None, :]
        tl.store(sum_ptrs, tl.where(is_empty, float("-inf"), sums), mask=is_sum)


@kernel(do_not_specialize=["max_blocks"])
def _add_shares(
    sums_ptr,  # [B, NUM_KV_HEADS, max_blocks, ROWS * GROUP_SIZE] fp32
    row_slot_ptr,  # [B * ROWS] int32
    row_position_ptr,  # [B * ROWS] int32
    shares_ptr,  # [B, NUM_KV_HEADS, max_blocks] fp32, written as far as there are keys
    max_blocks,
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1)
    query_row = tl.arange(0, TILE_ROWS)
    row = sequence * ROWS + query_row // GROUP_SIZE
    is_row = query_row < ROWS * GROUP_SIZE
    is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1) >= 0
    last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1)
    num_blocks = (tl.max(last_position, 0) + BLOCK_SIZE) // BLOCK_SIZE
    own = (sequence * NUM_KV_HEADS + head).to(tl.int64) * max_blocks
    block = tl.arange(0, TILE_BLOCKS)
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    for first in range(0, num_blocks, TILE_BLOCKS):
        index = first + block
        sum_ptrs = sums_ptr + (own + index)[None, :] * (ROWS * GROUP_SIZE) + query_row[:, None]
        is_sum = is_live[:, None] & (index < num_blocks)[None, :]
        sums = tl.load(sum_ptrs, mask=is_sum, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(sums, 1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp2(maximum - reference) + tl.sum(tl.exp2(sums - reference[:, None]), 1)
        maximum = new_maximum

    whole = tl.where(is_live, maximum + tl.log2(tl.where(is_live, total, 1.0)), 0.0)
    for first in range(0, num_blocks, TILE_BLOCKS):
        index = first + block
        sum_ptrs = sums_ptr + (own + index)[None, :] * (ROWS * GROUP_SIZE) + query_row[:, None]
        is_sum = is_live[:, None] & (index < num_blocks)[None, :]
        sums = tl.load(sum_ptrs, mask=is_sum, other=float("-inf"))
        share = tl.sum(tl.exp2(sums - whole[:, None]), 0)
        tl.store(shares_ptr + own + index, share, mask=index < num_blocks)


def block_shares(
    query: Tensor,
    keys: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    sums: Tensor,
    shares: Tensor,
    *,
    num_sequences: int,
    scale: float | None = None,
) -> None:
    """Write the shares of attention that the rows [B * T] of B sequences give each of their blocks.

    query [B * T', num_heads, head_dim], storage type: those of the last T of T' rows are taken. keys
    [num_blocks, num_kv_heads, block_size, head_dim], storage type, blocks of at most TILE_KEYS tokens.
    block_table [S, max_blocks] int32. row_slot, row_position [B * T] int32: slots (-1: a padding row, which
    sees nothing) and last positions that rows see. sums [B, num_kv_heads, max_blocks, T * group] fp32,
    written. shares [B, num_kv_heads, max_blocks] fp32, written for blocks with keys that some row sees.
    scale: of scores; None: 1 / sqrt(head_dim).
    All contiguous. Raises ValueError for another shape, type or layout.

    Long for the arguments of two kernels.
    """
    (num_rows,), (_, num_heads, head_dim) = row_slot.shape, query.shape
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    max_blocks, group, rows = block_table.shape[1], num_heads // num_kv_heads, num_rows // num_sequences
    check_power_of_two("block_size", block_size)
    if block_size > TILE_KEYS:
        raise ValueError(f"block_size: {block_size}: expected at most {TILE_KEYS}")

    check_tensor("query", query, query.shape, query.dtype)
    check_tensor("keys", keys, (num_blocks, num_kv_heads, block_size, head_dim), query.dtype)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    check_tensors((num_sequences * rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("sums", sums, (num_sequences, num_kv_heads, max_blocks, rows * group), torch.float32)
    check_tensor("shares", shares, (num_sequences, num_kv_heads, max_blocks), torch.float32)
    tile_rows = padded_size(rows * group)
    num_heads_all = num_kv_heads * num_sequences
    num_splits = PROGRAMS_PER_MULTIPROCESSOR * gpu_limits().num_multiprocessors // num_heads_all
    most_splits = -(-max_blocks * block_size // TILE_KEYS)
    _sum_blocks[(num_kv_heads, num_sequences, max(1, min(num_splits, most_splits)))](
        query,
        keys,
        block_table,
        row_slot,
        row_position,
        sums,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E.value,
        max_blocks,
        QUERY_ROWS=query.shape[0] // num_sequences,
        ROWS=rows,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_size(head_dim),
        TILE_ROWS=tile_rows,
        BLOCK_SIZE=block_size,
        TILE_KEYS=TILE_KEYS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
    _add_shares[(num_kv_heads, num_sequences)](
        sums,
        row_slot,
        row_position,
        shares,
        max_blocks,
        ROWS=rows,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        TILE_ROWS=tile_rows,
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=TILE_BLOCKS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


TOP_BIT, NUM_BITS = tl.constexpr(1 << 30), tl.constexpr(31)
"""The highest bit of a number that is not negative, and how many there are."""


@kernel(do_not_specialize=["max_blocks"])
def _select_blocks(
    shares_ptr,  # [B, NUM_KV_HEADS, max_blocks] fp32
    row_slot_ptr,  # [B * ROWS] int32; -1: padding row
    row_position_ptr,  # [B * ROWS] int32: the newest token's first
    selected_ptr,  # [S, NUM_RETRIEVED] int32, written
    max_blocks,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_RETRIEVED: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,  # max_blocks as a power of two
    PDL: tl.constexpr,
):
    """Program (sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(row_slot_ptr + sequence * ROWS)
    position = tl.load(row_position_ptr + sequence * ROWS)
    window_block = tl.maximum(position + 1 - WINDOW_TOKENS, 0) // BLOCK_SIZE
    if (slot >= 0) & (window_block > NUM_SINKS + NUM_RETRIEVED):
        block = tl.arange(0, PADDED_BLOCKS)
        is_candidate = (block >= NUM_SINKS) & (block < window_block)
        share = tl.zeros((PADDED_BLOCKS,), tl.float32)
        own_ptr = shares_ptr + sequence.to(tl.int64) * NUM_KV_HEADS * max_blocks + block
        for head in range(NUM_KV_HEADS):
            share += tl.load(own_ptr + head * max_blocks, mask=is_candidate, other=0.0)
        # A share that is not a number counts as none, so that as many blocks as expected are selected.
        share = tl.where(share >= 0.0, share, 0.0)
        bits = tl.where(is_candidate, share.to(tl.int32, bitcast=True), -1)
        border = position * 0
        bit = border + TOP_BIT
        for _ in range(NUM_BITS):
            raised = border | bit
            bit = bit >> 1
            border = tl.where(tl.sum((bits >= raised).to(tl.int32)) >= NUM_RETRIEVED, raised, border)
        is_above = bits > border
        is_equal = bits == border
        num_equal = NUM_RETRIEVED - tl.sum(is_above.to(tl.int32))
        is_selected = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal))
        place = tl.cumsum(is_selected.to(tl.int32), 0) - 1
        tl.store(selected_ptr + slot.to(tl.int64) * NUM_RETRIEVED + place, block, mask=is_selected)


def select_blocks(
    shares: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    selected: Tensor,
    layout: ViewLayout,
) -> None:
    """Write the retrieved blocks of B sequences in a layer: those with the largest shares between the first
    blocks and the window.

    shares [B, num_kv_heads, max_blocks] fp32. row_slot, row_position [B * T] int32: T rows of each sequence,
    of which the first is the newest token's. selected [S, layout.num_retrieved] int32, written for the slots
    of sequences that have more blocks than views have, ascending.
    Raises ValueError for another shape, type or layout.
    """
    num_sequences, num_kv_heads, max_blocks = shares.shape
    rows = row_slot.shape[0] // num_sequences
    check_tensor("shares", shares, shares.shape, torch.float32)
    check_tensors((num_sequences * rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("selected", selected, (selected.shape[0], layout.num_retrieved), torch.int32)
    padded_blocks = next_power_of_2(max_blocks)
    _select_blocks[(num_sequences,)](
        shares,
        row_slot,
        row_position,
        selected,
        max_blocks,
        ROWS=rows,
        NUM_KV_HEADS=num_kv_heads,
        NUM_SINKS=layout.num_sinks,
        NUM_RETRIEVED=layout.num_retrieved,
        WINDOW_TOKENS=layout.window_tokens,
        BLOCK_SIZE=layout.block_size,
        PADDED_BLOCKS=padded_blocks,
        PDL=uses_pdl(),
        num_warps=min(32, max(8, padded_blocks // 512)),
        **launch_options(),
    )


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
