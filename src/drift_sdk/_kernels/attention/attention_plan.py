"""The attention plan: the keys of a step cut into tiles, made once a step and used by all layers.

A sequence's keys lie in partitions with fixed borders (see `Partitions`), and a partition consists of tiles.
The plan is one list of the tiles of all sequences, in the order of sequences and then of keys. Each program
of paged attention takes an equal share of the list, with its ends moved to the next border of a partition.
Programs therefore finish together whatever the lengths are, and what is computed does not depend on how many
programs there are.

Sequences that share a prefix (see shared_prefixes.py) are companions: the tiles of the prefix are in the list
once, among those of the first companion.

With a window w, a row at position p sees the keys in (p - w, p]. A sequence's tiles then begin with the one
that holds the first key that any of its rows sees, wherever in a partition it lies; earlier tiles are not in
the list, and no prefix is shared. Layers with different windows have different plans.

Grid: one program for each sequence. It reads the rows of all sequences to find where its own tiles begin in
the list, and writes these. The program of the last sequence also writes their total number.

Bytes: 8 for each row in, read by every program, and 32 for each tile out. The time is that of a launch.

Dependent launch: the kernel waits first, then permits its dependents to start. The kernels of attention read
the plan before they wait, at least two kernels later.
"""

from __future__ import annotations

import torch
import triton.language as tl

from drift_sdk._kernels.attention.partitions import Partitions, partition_of, partition_start
from drift_sdk._kernels.attention.planned_rows import PlannedRows, sequences_of_rows
from drift_sdk._kernels.attention.shared_prefixes import (
    MAX_COMPANIONS,
    BlockTable,
    SharedPrefixes,
    find_shared_prefixes,
    most_companions,
)
from drift_sdk._kernels.common.arguments import check_range
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = [
    "TILE_COMPANIONS",
    "TILE_FIRST_KEY",
    "TILE_NUM_KEYS",
    "TILE_SEQUENCE",
    "TILE_SLOT",
    "TILE_WORDS",
    "AttentionPlan",
    "next_partition",
    "plan_attention",
]

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
