"""Prefixes that several sequences of a step share, found by the blocks in which their keys lie.

The prefix cache gives sequences with a common beginning the same blocks for it. Sequences whose block tables
begin with the same blocks are companions, a few of them at a time, and attention reads the keys of their
common blocks once: their query rows lie in one tile of a product, in which a single sequence would leave most
rows empty. No result depends on it, because the partitions of a row are summed by themselves.

Companions have at least the first partition in common; what they share ends at the border of a partition.
Sequences with the same first partition become companions in the order of the step, `most_companions` at a
time.

Grid: one program for each sequence. It compares the blocks of its sequence with those of all others, some
columns at a time, until they differ.

What companions share is the least that one of them shares with another one. That is the same for each of
them: of three sequences, no two have less in common than the third has with both.

Bytes: 64 for each sequence in the first columns, read by every program. The time is that of a launch; a
prefix of 32K tokens in blocks of 64 takes 32 times the first columns.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import padded_size
from drift_sdk._kernels.attention.partitions import Partitions, partition_of, partition_start
from drift_sdk._kernels.attention.planned_rows import PlannedRows, sequences_of_rows
from drift_sdk._kernels.common.arguments import check_range, check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = [
    "MAX_COMPANIONS",
    "BlockTable",
    "SharedPrefixes",
    "find_shared_prefixes",
    "most_companions",
]

MAX_COMPANIONS = tl.constexpr(4)
"""Most sequences that share a tile: four of one row each, with four query heads for each KV head, fill the
least tile of a product."""

NUM_COLUMNS = 16
"""Columns of the block table that a program compares at a time."""
NUM_WARPS = 8


class BlockTable(Struct, frozen=True):
    """The blocks of the KV cache in which the keys of slots lie.

    table: [S, max_blocks] int32, those of each slot in order. block_size: keys of a block.
    """

    table: Tensor
    block_size: int


class SharedPrefixes(Struct, frozen=True):
    """Prefixes that the sequences of a step share with their companions.

    num_keys: [num_sequences] int32, the keys of the prefix; 0 without companions.
    companions: [num_sequences, MAX_COMPANIONS] int32, the indices of all that share it in ascending order,
    the sequence's own among them, then -1. Without companions, its own comes first.
    """

    num_keys: Tensor
    companions: Tensor

    @classmethod
    def allocate(cls, num_sequences: int, device: torch.device) -> SharedPrefixes:
        """Allocate memory for the prefixes of `num_sequences` sequences."""
        return cls(
            torch.empty(num_sequences, dtype=torch.int32, device=device),
            torch.empty(num_sequences, MAX_COMPANIONS.value, dtype=torch.int32, device=device),
        )


def most_companions(rows: PlannedRows, group: int, window: int) -> int:
    """Return how many sequences may share a tile of query rows: those that fit into the tile of one. Where
    rows see a window of keys, or there is one sequence, no tile is shared.

    group: query heads that share a KV head. window: see `LayerAttention`.
    """
    if window > 0 or rows.num_sequences == 1:
        return 1

    num_query_rows = rows.rows_per_sequence * group
    return min(int(MAX_COMPANIONS.value), padded_size(num_query_rows) // num_query_rows)


@kernel(
    do_not_specialize=["num_sequences", "max_blocks"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _find(
    row_slot_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32; -1: padding row
    row_position_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32
    block_table_ptr,  # [S, max_blocks] int32
    shared_keys_ptr,  # [num_sequences] int32, written
    companions_ptr,  # [num_sequences, MAX_COMPANIONS] int32, written
    num_sequences,
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,  # at least num_sequences, a power of two
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_COMPANIONS: tl.constexpr,  # most of them
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (s): the companions of sequence s. A third of its lines are arguments."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    own = tl.program_id(0)
    sequence = tl.arange(0, PADDED_SEQUENCES)
    num_keys, slots, _ = sequences_of_rows(
        row_slot_ptr, row_position_ptr, num_sequences, ROWS_PER_SEQUENCE, PADDED_SEQUENCES
    )
    is_own = sequence == own
    own_slot = tl.max(tl.where(is_own, slots, 0))
    num_blocks = tl.minimum(num_keys, tl.sum(tl.where(is_own, num_keys, 0))) // KV_BLOCK_SIZE
    table_ptrs = block_table_ptr + slots.to(tl.int64) * max_blocks
    own_ptr = block_table_ptr + own_slot.to(tl.int64) * max_blocks
    # num_common: blocks that each sequence has in common with this one; is_open: it may have more.
    num_common = tl.zeros_like(sequence)
    is_open = (num_blocks > 0) & (sequence != own)
    column = tl.arange(0, NUM_COLUMNS)
    first = 0
    while tl.max(is_open.to(tl.int32)) > 0:
        is_block = is_open[:, None] & (first + column[None, :] < num_blocks[:, None])
        blocks = tl.load(table_ptrs[:, None] + (first + column)[None, :], mask=is_block, other=-1)
        own_blocks = tl.load(own_ptr + first + column, mask=first + column < max_blocks, other=-2)
        is_other = (blocks != own_blocks[None, :]) | (is_block == 0)
        num_equal = tl.min(tl.where(is_other, column[None, :], NUM_COLUMNS), 1)
        num_common = tl.where(is_open, first + num_equal, num_common)
        is_open = is_open & (num_equal == NUM_COLUMNS)
        first += NUM_COLUMNS

    # Down to the border of a partition.
    common = partition_of(num_common * KV_BLOCK_SIZE, NARROW, NARROW_END, NUM_DOUBLINGS)
    common_keys = partition_start(common, NARROW, NARROW_END, NUM_DOUBLINGS)
    is_alike = ((common_keys > 0) | is_own).to(tl.int32)
    rank = tl.cumsum(is_alike, 0) - 1
    own_part = tl.sum(tl.where(is_own, rank, 0)) // NUM_COMPANIONS
    is_companion = (is_alike > 0) & (rank // NUM_COMPANIONS == own_part)
    least = tl.min(tl.where(is_companion & (sequence != own), common_keys, 0x7FFFFFFF))
    shared_keys = tl.where(least == 0x7FFFFFFF, 0, least)
    tl.store(shared_keys_ptr + own, shared_keys)
    for index in tl.static_range(MAX_COMPANIONS):
        companion = tl.max(tl.where(is_companion & (rank % NUM_COMPANIONS == index), sequence, -1))
        if index >= NUM_COMPANIONS:
            companion = tl.full((), -1, tl.int32)
        tl.store(companions_ptr + own * MAX_COMPANIONS + index, companion)


def find_shared_prefixes(
    rows: PlannedRows, blocks: BlockTable, group: int, partitions: Partitions, shared: SharedPrefixes
) -> None:
    """Write the prefixes that the sequences of rows share. group: see `most_companions`.

    Raises ValueError for rows or a block table of another type or layout, and for sequences without room.
    """
    num_sequences = rows.num_sequences
    rows.check(rows.slot.shape[0])
    check_tensor("block_table", blocks.table, blocks.table.shape, torch.int32)
    check_range("num_sequences", num_sequences, 1, shared.num_keys.shape[0])
    _find[(num_sequences,)](
        row_slot_ptr=rows.slot,
        row_position_ptr=rows.position,
        block_table_ptr=blocks.table,
        shared_keys_ptr=shared.num_keys,
        companions_ptr=shared.companions,
        num_sequences=num_sequences,
        max_blocks=blocks.table.shape[1],
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        PADDED_SEQUENCES=rows.padded_sequences,
        KV_BLOCK_SIZE=blocks.block_size,
        NUM_COLUMNS=NUM_COLUMNS,
        NUM_COMPANIONS=most_companions(rows, group, window=0),
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        NUM_DOUBLINGS=partitions.num_doublings,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
