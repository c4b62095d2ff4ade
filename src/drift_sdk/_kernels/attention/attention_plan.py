"""Which keys a step attends to, cut into tiles and dealt out: made once a step, used by all layers.

A sequence's keys fall into partitions at fixed positions (see `Partitions`), a partition into tiles. The
tiles of all sequences stand in one list, and each program takes an equal share of it, moved on to whole
partitions: programs finish together whatever the lengths are, and what is computed does not depend on how
many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["AttentionPlan", "Partitions", "partition_of", "partition_start", "plan_attention"]

TILE_WORDS = tl.constexpr(4)


class Partitions(Struct, frozen=True):
    """`narrow` keys wide up to position `narrow_end`, `wide` ones after it; tiles of `tile` keys.

    Part of the result's bits. Short contexts want narrow partitions, to fill the machine; long ones wide,
    with less to add up.
    """

    narrow: int = 128
    narrow_end: int = 1024
    wide: int = 512
    tile: int = 64

    def __post_init__(self) -> None:
        if self.narrow % self.tile or self.wide % self.tile or self.narrow_end % self.narrow:
            raise ValueError(f"{self}: expected widths of whole tiles, and whole partitions to narrow_end")

    def count(self, num_keys: int) -> int:
        """How many partitions `num_keys` keys lie in."""
        narrow, wide = min(num_keys, self.narrow_end), max(num_keys - self.narrow_end, 0)
        return -(-narrow // self.narrow) - (-wide // self.wide)


class AttentionPlan:
    """The list of tiles of at most `num_sequences` sequences of at most `max_num_keys` keys.

    tiles:     [num_sequences * max tiles, 4] int32, in order: sequence, its slot, its number of keys, the
               tile's first key.
    num_tiles: [1] int32.
    """

    def __init__(
        self, num_sequences: int, max_num_keys: int, partitions: Partitions, device: torch.device
    ) -> None:
        self.num_sequences = num_sequences
        self.partitions = partitions
        self.max_num_partitions = partitions.count(max_num_keys)
        most = num_sequences * -(-max_num_keys // partitions.tile)
        self.tiles = torch.empty(most, 4, dtype=torch.int32, device=device)
        self.num_tiles = torch.empty(1, dtype=torch.int32, device=device)


@triton.jit
def partition_of(position, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr):
    """The partition that a position lies in."""
    wide = NARROW_END // NARROW + (position - NARROW_END) // WIDE
    return tl.where(position < NARROW_END, position // NARROW, wide)


@triton.jit
def partition_start(index, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr):
    """The first position of a partition."""
    wide = NARROW_END + (index - NARROW_END // NARROW) * WIDE
    return tl.where(index < NARROW_END // NARROW, index * NARROW, wide)


@triton.jit(do_not_specialize=["num_sequences"])
def _plan(
    row_slot, row_position, tiles, num_tiles, num_sequences,
    ROWS: tl.constexpr, SEQUENCES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    own = tl.program_id(0)
    sequence = tl.arange(0, SEQUENCES)
    num_keys = tl.zeros_like(sequence)
    slots = num_keys - 1
    for row in tl.static_range(ROWS):
        is_sequence = sequence < num_sequences
        slot = tl.load(row_slot + sequence * ROWS + row, mask=is_sequence, other=-1)
        position = tl.load(row_position + sequence * ROWS + row, mask=is_sequence, other=0)
        num_keys = tl.maximum(num_keys, tl.where(slot >= 0, position + 1, 0))
        slots = tl.maximum(slots, slot)

    counts = (num_keys + TILE - 1) // TILE
    first = tl.sum(tl.where(sequence < own, counts, 0))
    count = tl.sum(tl.where(sequence == own, counts, 0))
    own_slot = tl.max(tl.where(sequence == own, slots, -1))
    own_keys = tl.sum(tl.where(sequence == own, num_keys, 0))
    for start in range(0, count, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        place = tiles + (first + tile) * TILE_WORDS
        is_tile = tile < count
        tl.store(place, own + tile * 0, mask=is_tile)
        tl.store(place + 1, own_slot + tile * 0, mask=is_tile)
        tl.store(place + 2, own_keys + tile * 0, mask=is_tile)
        tl.store(place + 3, tile * TILE, mask=is_tile)
    if own == num_sequences - 1:
        tl.store(num_tiles, first + count)


def plan_attention(
    row_slot: Tensor, row_position: Tensor, plan: AttentionPlan, rows_per_sequence: int
) -> None:
    """Fill a plan for rows that see positions 0 ... row_position[r] of slot row_slot[r], none if it is -1.

    Each `rows_per_sequence` rows in turn are one sequence.
    """
    num_sequences = row_slot.shape[0] // rows_per_sequence
    if num_sequences > plan.num_sequences:
        raise ValueError(f"{num_sequences} sequences: expected at most {plan.num_sequences}")

    _plan[(num_sequences,)](
        row_slot, row_position, plan.tiles, plan.num_tiles, num_sequences,
        rows_per_sequence, triton.next_power_of_2(num_sequences), plan.partitions.tile, 512, uses_pdl(),
        num_warps=4, **launch_options(),
    )  # fmt: skip
