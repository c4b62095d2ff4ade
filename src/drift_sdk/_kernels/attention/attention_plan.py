"""The attention plan: the keys of a step cut into tiles, made once a step and used by all layers.

A sequence's keys lie in partitions with fixed borders (see `Partitions`), and a partition consists of tiles.
The plan is one list of the tiles of all sequences, in the order of sequences and then of keys. Each program
of paged attention takes an equal share of the list, with its ends moved to the next border of a partition.
Programs therefore finish together whatever the lengths are, and what is computed does not depend on how many
programs there are.

With a window w, a row at position p sees the keys in (p - w, p]. A sequence's tiles then begin with the one
that holds the first key that any of its rows sees, wherever in a partition it lies; earlier tiles are not in
the list. Layers with different windows have different plans.

Grid: one program for each sequence. It reads the rows of all sequences to find where its own tiles begin in
the list, and writes these. The program of the last sequence also writes their total number.

Bytes: 8 for each row in, read by every program, and 16 for each tile out. The time is that of a launch.

Dependent launch: the kernel waits first, then permits its dependents to start. The kernels of attention read
the plan before they wait, at least two kernels later.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_range, check_tensors
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = [
    "TILE_FIRST_KEY",
    "TILE_NUM_KEYS",
    "TILE_SEQUENCE",
    "TILE_SLOT",
    "TILE_WORDS",
    "AttentionPlan",
    "Partitions",
    "PlannedRows",
    "next_partition",
    "partition_of",
    "partition_start",
    "plan_attention",
    "plan_attention_reference",
]

# Words of a tile in the list, int32.
TILE_SEQUENCE = tl.constexpr(0)  # the sequence's index in the step
TILE_SLOT = tl.constexpr(1)  # the sequence's slot
TILE_NUM_KEYS = tl.constexpr(2)  # how many keys the sequence has
TILE_FIRST_KEY = tl.constexpr(3)  # the position of the tile's first key
TILE_WORDS = tl.constexpr(4)

NUM_WARPS = 4
MIN_PADDED_SEQUENCES = 16
"""Least number of sequences that `_plan` is compiled for: steps of 1 to 16 share one."""
CHUNK_TILES = 512
"""Tiles that a program writes at a time: four for each of the 128 threads of four warps."""


class Partitions(Struct, frozen=True):
    """Borders at which the keys of a sequence are cut; part of the result's bits.

    Up to position `narrow_end`, partitions are `narrow` keys wide; after it, `wide` keys. They consist of
    tiles of `tile` keys. Short contexts need narrow partitions, to fill the GPU; long ones need wide
    partitions, which leave less to add up.

    In whole steps on an H200, for Llama-3.1-8B shapes, partitions of 64 keys were 0.9% faster than 128 for
    one short sequence and 0.5% slower for eight (docs/performance.md, "What was tried").
    """

    narrow: int = 128
    narrow_end: int = 1024
    wide: int = 512
    tile: int = 64

    @classmethod
    def of_window(cls, window: int) -> Partitions:
        """Borders for rows that see only their last `window` keys; 0: all keys.

        Few keys need narrow partitions wherever they lie.
        """
        default = cls()
        if not 0 < window <= default.narrow_end:
            return default

        return cls(narrow_end=0, wide=default.narrow)

    def __post_init__(self) -> None:
        if self.narrow % self.tile or self.wide % self.tile or self.narrow_end % self.narrow:
            raise ValueError(f"{self}: expected widths of whole tiles, and whole partitions to narrow_end")

    def count(self, num_keys: int) -> int:
        """Return how many partitions `num_keys` keys lie in."""
        narrow, wide = min(num_keys, self.narrow_end), max(num_keys - self.narrow_end, 0)
        return -(-narrow // self.narrow) - (-wide // self.wide)

    def most(self, num_keys: int) -> int:
        """Return the most partitions that `num_keys` neighbouring keys lie in, wherever they begin."""
        return -(-(num_keys - 1) // min(self.narrow, self.wide)) + 1

    def room(self, max_num_keys: int, window: int, num_rows: int) -> int:
        """Return how many partitions the keys may lie in that `num_rows` neighbouring rows of a sequence of
        at most `max_num_keys` keys see, each the last `window` keys; 0: all."""
        every = self.count(max_num_keys)
        return min(every, self.most(window + num_rows - 1)) if window > 0 else every


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
        """Some of the rows, those of whole sequences."""
        return replace(self, slot=self.slot[rows], position=self.position[rows])

    def check(self, num_rows: int) -> None:
        """Raise ValueError for tensors of another shape, type or layout."""
        check_tensors((num_rows,), torch.int32, row_slot=self.slot, row_position=self.position)


class AttentionPlan:
    """The list of tiles of at most `num_sequences` sequences of at most `max_num_keys` keys.

    window: how many keys a row sees, its own being the last; 0: all.
    num_rows: most rows of a sequence, where a window bounds what they see together.
    tiles: [max_num_tiles, 4] int32, in order; the words are TILE_SEQUENCE, TILE_SLOT, TILE_NUM_KEYS and
    TILE_FIRST_KEY. max_num_tiles: num_sequences times the tiles that all keys, or those in the window of some
    row, may lie in.
    num_tiles: [1] int32, how many of them are in use.
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


@triton.jit
def partition_of(position, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr):
    """Return the index of the partition that a position lies in."""
    wide = NARROW_END // NARROW + (position - NARROW_END) // WIDE
    return tl.where(position < NARROW_END, position // NARROW, wide)


@triton.jit
def partition_start(index, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr):
    """Return the first position of a partition, given its index."""
    wide = NARROW_END + (index - NARROW_END // NARROW) * WIDE
    return tl.where(index < NARROW_END // NARROW, index * NARROW, wide)


@triton.jit
def next_partition(
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    tile_index,
    num_tiles,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the index of the first tile, from tile_index on, at which a partition starts.

    With a window, a sequence's first tile also counts as the start of one.
    """
    is_tile = tile_index < num_tiles
    tile_ptr = tiles_ptr + tile_index * TILE_WORDS
    num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, mask=is_tile, other=0, cache_modifier=".cg")
    first_key = tl.load(tile_ptr + TILE_FIRST_KEY, mask=is_tile, other=0, cache_modifier=".cg")
    partition = partition_of(first_key, NARROW, NARROW_END, WIDE)
    is_start = partition_start(partition, NARROW, NARROW_END, WIDE) == first_key
    if WINDOW > 0:
        sequence_ptr = tile_ptr + TILE_SEQUENCE
        sequence = tl.load(sequence_ptr, mask=is_tile, other=-1, cache_modifier=".cg")
        has_before = is_tile & (tile_index > 0)
        before = tl.load(sequence_ptr - TILE_WORDS, mask=has_before, other=-1, cache_modifier=".cg")
        is_start = is_start | (sequence != before)
    next_start = partition_start(partition + 1, NARROW, NARROW_END, WIDE)
    num_skipped = (tl.minimum(next_start, num_keys) - first_key + TILE_KEYS - 1) // TILE_KEYS
    return tl.where(is_start, tile_index, tile_index + num_skipped)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _plan(
    row_slot_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32; -1: padding row
    row_position_ptr,  # [num_sequences * ROWS_PER_SEQUENCE] int32
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
    """Program (s): the tiles of sequence s."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    own = tl.program_id(0)
    sequence = tl.arange(0, PADDED_SEQUENCES)
    # Of every sequence: the keys that its last live row sees, and its slot; 0 and -1 without a live row.
    num_keys = tl.zeros_like(sequence)
    slots = num_keys - 1
    first_position = num_keys + 0x7FFFFFFF  # of the first live row
    for row in tl.static_range(ROWS_PER_SEQUENCE):
        is_sequence = sequence < num_sequences
        slot = tl.load(row_slot_ptr + sequence * ROWS_PER_SEQUENCE + row, mask=is_sequence, other=-1)
        position = tl.load(row_position_ptr + sequence * ROWS_PER_SEQUENCE + row, mask=is_sequence, other=0)
        num_keys = tl.maximum(num_keys, tl.where(slot >= 0, position + 1, 0))
        slots = tl.maximum(slots, slot)
        if WINDOW > 0:
            first_position = tl.minimum(first_position, tl.where(slot >= 0, position, 0x7FFFFFFF))

    num_tiles = (num_keys + TILE_KEYS - 1) // TILE_KEYS
    if WINDOW > 0:
        # Tiles whose keys no row sees are left out. Without a live row there are none.
        skipped_tiles = tl.minimum(tl.maximum(first_position - (WINDOW - 1), 0) // TILE_KEYS, num_tiles)
        num_tiles -= skipped_tiles
    own_first_tile = tl.sum(tl.where(sequence < own, num_tiles, 0))
    own_num_tiles = tl.sum(tl.where(sequence == own, num_tiles, 0))
    own_slot = tl.max(tl.where(sequence == own, slots, -1))
    own_num_keys = tl.sum(tl.where(sequence == own, num_keys, 0))
    own_first_key = 0
    if WINDOW > 0:
        own_first_key = tl.sum(tl.where(sequence == own, skipped_tiles, 0)) * TILE_KEYS
    for first_tile in range(0, own_num_tiles, CHUNK_TILES):
        tile = first_tile + tl.arange(0, CHUNK_TILES)
        tile_ptrs = tiles_ptr + (own_first_tile + tile) * TILE_WORDS
        is_tile = tile < own_num_tiles
        tl.store(tile_ptrs + TILE_SEQUENCE, own + tile * 0, mask=is_tile)
        tl.store(tile_ptrs + TILE_SLOT, own_slot + tile * 0, mask=is_tile)
        tl.store(tile_ptrs + TILE_NUM_KEYS, own_num_keys + tile * 0, mask=is_tile)
        tl.store(tile_ptrs + TILE_FIRST_KEY, own_first_key + tile * TILE_KEYS, mask=is_tile)
    if own == num_sequences - 1:
        tl.store(num_tiles_ptr, own_first_tile + own_num_tiles)


def plan_attention(rows: PlannedRows, plan: AttentionPlan) -> None:
    """Write `plan` for rows, each of which sees all positions up to its own, or the last `plan.window` of
    these.

    Raises ValueError for rows of another shape, type or layout, and for more sequences, or with a window more
    rows of a sequence, than the plan has room for.
    """
    rows.check(rows.slot.shape[0])
    num_sequences = rows.num_sequences
    if num_sequences > plan.num_sequences:
        raise ValueError(f"row_slot: {num_sequences} sequences: expected at most {plan.num_sequences}")

    if plan.window > 0:
        check_range("rows_per_sequence", rows.rows_per_sequence, 1, plan.num_rows)

    _plan[(num_sequences,)](
        row_slot_ptr=rows.slot,
        row_position_ptr=rows.position,
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        num_sequences=num_sequences,
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        PADDED_SEQUENCES=max(MIN_PADDED_SEQUENCES, triton.next_power_of_2(num_sequences)),
        WINDOW=plan.window,
        TILE_KEYS=plan.partitions.tile,
        CHUNK_TILES=CHUNK_TILES,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


def plan_attention_reference(rows: PlannedRows, partitions: Partitions, window: int = 0) -> Tensor:
    """Return the tiles in use, [num_tiles, 4] int32, as `plan_attention` writes them."""
    tile = partitions.tile
    tiles: list[tuple[int, int, int, int]] = []
    sequences = zip(
        rows.slot.view(-1, rows.rows_per_sequence).tolist(),
        rows.position.view(-1, rows.rows_per_sequence).tolist(),
        strict=True,
    )
    for sequence, (slots, positions) in enumerate(sequences):
        live = [position for slot, position in zip(slots, positions, strict=True) if slot >= 0]
        if live:
            num_keys = max(live) + 1
            first_seen = max(min(live) - window + 1, 0) if window else 0
            first_keys = range(first_seen // tile * tile, num_keys, tile)
            tiles.extend((sequence, max(slots), num_keys, first_key) for first_key in first_keys)
    return torch.tensor(tiles, dtype=torch.int32, device=rows.slot.device).view(-1, TILE_WORDS.value)
