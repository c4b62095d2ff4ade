"""The attention plan: the keys of a step cut into tiles, made once a step and used by all layers.

A sequence's keys lie in partitions with fixed borders (see `Partitions`), and a partition consists of tiles.
The plan is one list of the tiles of all sequences, in the order of sequences and then of keys. Each program
of paged attention takes an equal share of the list, with its ends moved to the next border of a partition.
Programs therefore finish together whatever the lengths are, and what is computed does not depend on how many
programs there are.

Sequences that share a prefix are companions: the tiles of the prefix are in the list
once, among those of the first companion.

With a window w, a row at position p sees the keys in (p - w, p]. A sequence's tiles then begin with the one
that holds the first key that any of its rows sees, wherever in a partition it lies; earlier tiles are not in
the list, and no prefix is shared. Layers with different windows have different plans.

Grid: one program for each sequence. It reads the rows of all sequences to find where its own tiles begin in
the list, and writes these. The program of the last sequence also writes their total number.

Bytes: 8 for each row in, read by every program, and 32 for each tile out. The time is that of a launch.

Dependent launch: the kernel waits first, then permits its dependents to start. The kernels of attention read
the plan before they wait, at least two kernels later.

Prefixes that several sequences of a step share, found by the blocks in which their keys lie.

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
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import padded_size
from drift_sdk._kernels.attention.softmax import Partitions, partition_of, partition_start
from drift_sdk._kernels.launch.arguments import check_range, check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

MIN_PADDED_SEQUENCES = 256
"""Least number of sequences that kernels of the plan are compiled for: steps of 1 to 256 share one."""


class PlannedRows(Struct, frozen=True):
    """Rows of a step that a plan is made of, equally many of each sequence.

    slot, position: [R] int32. A row sees positions 0 ... position of its slot, or the last `window` of these.
    Rows of slot -1 see nothing.
    rows_per_sequence: consecutive rows that belong to a sequence. With a window, those of them that see
    anything come first and have consecutive positions.
    """

    slot: Tensor
    position: Tensor
    rows_per_sequence: int

    @property
    def num_sequences(self) -> int:
        return self.slot.shape[0] // self.rows_per_sequence

    def of_rows(self, rows: slice) -> PlannedRows:
        """Some of the rows, those of whole sequences, or all."""
        if rows == slice(0, self.slot.shape[0]):
            return self

        return replace(self, slot=self.slot[rows], position=self.position[rows])

    def check(self, num_rows: int) -> None:
        """Raise ValueError for tensors of another shape, type or layout."""
        check_tensors((num_rows,), torch.int32, row_slot=self.slot, row_position=self.position)

    @property
    def padded_sequences(self) -> int:
        """The sequences that kernels are compiled for, a power of two."""
        return max(MIN_PADDED_SEQUENCES, next_power_of_2(self.num_sequences))


@device_function
def sequences_of_rows(
    row_slot_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32; -1: padding row
    row_position_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32
    num_sequences,
    ROWS_PER_SEQUENCE: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
):
    """Return of every sequence the keys that its last live row sees, its slot, and the position of its first
    live row; 0, -1 and the largest integer without a live row."""
    sequence = tl.arange(0, PADDED_SEQUENCES)
    is_sequence = sequence < num_sequences
    num_keys = tl.zeros_like(sequence)
    slots = num_keys - 1
    first_position = num_keys + 0x7FFFFFFF
    for row in tl.static_range(ROWS_PER_SEQUENCE):
        index = sequence * ROWS_PER_SEQUENCE + row
        slot = tl.load(row_slot_ptr + index, mask=is_sequence, other=-1)
        position = tl.load(row_position_ptr + index, mask=is_sequence, other=0)
        is_live = slot >= 0
        num_keys = tl.maximum(num_keys, tl.where(is_live, position + 1, 0))
        slots = tl.maximum(slots, slot)
        first_position = tl.minimum(first_position, tl.where(is_live, position, 0x7FFFFFFF))
    return num_keys, slots, first_position


MAX_COMPANIONS = tl.constexpr(4)
"""Most sequences that share a tile: four of one row each, with four query heads for each KV head, fill the
least tile of a product."""

NUM_COLUMNS = 16
"""Columns of the block table that a program compares at a time."""
PREFIX_WARPS = 8


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
        num_warps=PREFIX_WARPS,
        **launch_options(),
    )


# Words of a tile in the list, int32.
TILE_SEQUENCE = tl.constexpr(0)  # the sequence's index in the step; of companions, the first one's
TILE_SLOT = tl.constexpr(1)  # the sequence's slot
TILE_NUM_KEYS = tl.constexpr(2)  # where its keys end, or those of the shared prefix that the tile lies in
TILE_FIRST_KEY = tl.constexpr(3)  # the position of the tile's first key
TILE_COMPANIONS = tl.constexpr(4)  # the indices of all sequences that have these keys, MAX_COMPANIONS or -1
TILE_WORDS = tl.constexpr(8)

NUM_WARPS = 4
CHUNK_TILES = 512
"""Tiles that a program writes at a time: four for each of the 128 threads of four warps."""


class AttentionPlan:
    """The list of tiles of at most `num_sequences` sequences of at most `max_num_keys` keys.

    window: how many keys a row sees, its own being the last; 0: all.
    num_rows: most rows of a sequence, where a window bounds what they see together.
    tiles: [max_num_tiles, 8] int32, in order; the words are TILE_SEQUENCE, TILE_SLOT, TILE_NUM_KEYS,
    TILE_FIRST_KEY and, from TILE_COMPANIONS on, four indices of sequences. max_num_tiles: num_sequences times
    the tiles that all keys, or those in the window of some row, may lie in.
    num_tiles: [1] int32, how many of them are in use.
    shared: the prefixes that sequences share.
    max_num_partitions: how many partitions of a sequence the tiles may lie in.
    """

    def __init__(
        self,
        num_sequences: int,
        max_num_keys: int,
        partitions: Partitions,
        device: torch.device,
        *,
        window: int = 0,
        num_rows: int = 1,
    ) -> None:
        check_range("window", window, 0)
        self.num_sequences = num_sequences
        self.partitions = partitions
        self.window, self.num_rows = window, num_rows
        self.max_num_partitions = partitions.room(max_num_keys, window, num_rows)
        num_tiles = -(-max_num_keys // partitions.tile)
        if window > 0:
            num_tiles = min(num_tiles, -(-(window + num_rows - 2) // partitions.tile) + 1)
        max_num_tiles = num_sequences * num_tiles
        self.tiles = torch.empty(max_num_tiles, TILE_WORDS.value, dtype=torch.int32, device=device)
        self.num_tiles = torch.empty(1, dtype=torch.int32, device=device)
        self.shared = SharedPrefixes.allocate(num_sequences, device)


@device_function
def next_partition(
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    tile_index,
    num_tiles,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
):
    """Return the index of the first tile, from tile_index on, at which a partition starts.

    With a window, a sequence's first tile also counts as the start of one.
    """
    is_tile = tile_index < num_tiles
    tile_ptr = tiles_ptr + tile_index * TILE_WORDS
    num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, mask=is_tile, other=0, cache_modifier=".cg")
    first_key = tl.load(tile_ptr + TILE_FIRST_KEY, mask=is_tile, other=0, cache_modifier=".cg")
    partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
    is_start = partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS) == first_key
    if WINDOW > 0:
        sequence_ptr = tile_ptr + TILE_SEQUENCE
        sequence = tl.load(sequence_ptr, mask=is_tile, other=-1, cache_modifier=".cg")
        has_before = is_tile & (tile_index > 0)
        before = tl.load(sequence_ptr - TILE_WORDS, mask=has_before, other=-1, cache_modifier=".cg")
        is_start = is_start | (sequence != before)
    next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
    num_skipped = (tl.minimum(next_start, num_keys) - first_key + TILE_KEYS - 1) // TILE_KEYS
    return tl.where(is_start, tile_index, tile_index + num_skipped)


@kernel(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _plan(
    row_slot_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32; -1: padding row
    row_position_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32
    shared_keys_ptr,  # [num_sequences] int32, or None: no prefix is shared
    companions_ptr,  # [num_sequences, MAX_COMPANIONS] int32
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    num_sequences,
    ROWS_PER_SEQUENCE: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,  # at least num_sequences, a power of two
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (s): the tiles of sequence s. A third of its lines are arguments."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    own = tl.program_id(0)
    sequence = tl.arange(0, PADDED_SEQUENCES)
    num_keys, slots, first_position = sequences_of_rows(
        row_slot_ptr, row_position_ptr, num_sequences, ROWS_PER_SEQUENCE, PADDED_SEQUENCES
    )
    num_tiles = (num_keys + TILE_KEYS - 1) // TILE_KEYS
    skipped_tiles = tl.zeros_like(sequence)
    if WINDOW > 0:
        # Tiles whose keys no row sees are left out. Without a live row there are none.
        skipped_tiles = tl.minimum(tl.maximum(first_position - (WINDOW - 1), 0) // TILE_KEYS, num_tiles)
    own_shared_keys = 0
    if shared_keys_ptr is not None:
        # Companions leave the tiles of their prefix to the first of them.
        is_sequence = sequence < num_sequences
        shared_keys = tl.load(shared_keys_ptr + sequence, mask=is_sequence, other=0)
        first = tl.load(companions_ptr + sequence * MAX_COMPANIONS, mask=is_sequence, other=0)
        skipped_tiles = tl.where(first == sequence, 0, shared_keys // TILE_KEYS)
        own_shared_keys = tl.load(shared_keys_ptr + own)
    num_tiles -= skipped_tiles
    own_first_tile = tl.sum(tl.where(sequence < own, num_tiles, 0))
    own_num_tiles = tl.sum(tl.where(sequence == own, num_tiles, 0))
    own_slot = tl.max(tl.where(sequence == own, slots, -1))
    own_num_keys = tl.sum(tl.where(sequence == own, num_keys, 0))
    own_first_key = tl.sum(tl.where(sequence == own, skipped_tiles, 0)) * TILE_KEYS
    for first_tile in range(0, own_num_tiles, CHUNK_TILES):
        tile = first_tile + tl.arange(0, CHUNK_TILES)
        tile_ptrs = tiles_ptr + (own_first_tile + tile) * TILE_WORDS
        is_tile = tile < own_num_tiles
        first_key = own_first_key + tile * TILE_KEYS
        is_shared = first_key < own_shared_keys
        tl.store(tile_ptrs + TILE_SEQUENCE, own + tile * 0, mask=is_tile)
        tl.store(tile_ptrs + TILE_SLOT, own_slot + tile * 0, mask=is_tile)
        end = tl.where(is_shared, own_shared_keys, own_num_keys)
        tl.store(tile_ptrs + TILE_NUM_KEYS, end, mask=is_tile)
        tl.store(tile_ptrs + TILE_FIRST_KEY, first_key, mask=is_tile)
        for index in tl.static_range(MAX_COMPANIONS):
            companion = tl.where(index == 0, own, -1) + tile * 0
            if shared_keys_ptr is not None:
                other = tl.load(companions_ptr + own * MAX_COMPANIONS + index)
                companion = tl.where(is_shared, other, companion)
            tl.store(tile_ptrs + (TILE_COMPANIONS + index), companion, mask=is_tile)
    if own == num_sequences - 1:
        tl.store(num_tiles_ptr, own_first_tile + own_num_tiles)


def plan_attention(
    rows: PlannedRows, plan: AttentionPlan, blocks: BlockTable | None = None, group: int = 1
) -> None:
    """Write `plan` for rows, each of which sees all positions up to its own, or the last `plan.window` of
    these.

    blocks: in which prefixes that sequences share are looked for, if a plan without a window is made.
    group: query heads that share a KV head.
    Kernels of attention read the plan before they wait: at least one other kernel lies between.
    Raises ValueError for rows or blocks of another shape, type or layout, and for more sequences, or with a
    window more rows of a sequence, than the plan has room for.
    """
    rows.check(rows.slot.shape[0])
    num_sequences = rows.num_sequences
    if num_sequences > plan.num_sequences:
        raise ValueError(f"row_slot: {num_sequences} sequences: expected at most {plan.num_sequences}")

    if plan.window > 0:
        check_range("rows_per_sequence", rows.rows_per_sequence, 1, plan.num_rows)

    is_shared = blocks is not None and most_companions(rows, group, plan.window) > 1
    if blocks is not None and is_shared:
        find_shared_prefixes(rows, blocks, group, plan.partitions, plan.shared)
    _plan[(num_sequences,)](
        row_slot_ptr=rows.slot,
        row_position_ptr=rows.position,
        shared_keys_ptr=plan.shared.num_keys if is_shared else None,
        companions_ptr=plan.shared.companions,
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        num_sequences=num_sequences,
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        PADDED_SEQUENCES=rows.padded_sequences,
        WINDOW=plan.window,
        TILE_KEYS=plan.partitions.tile,
        CHUNK_TILES=CHUNK_TILES,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
