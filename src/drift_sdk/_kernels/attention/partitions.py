"""Borders at which the keys of a sequence are cut into partitions, each summed by itself."""

from __future__ import annotations

import triton
import triton.language as tl
from msgspec import Struct

__all__ = ["Partitions", "partition_of", "partition_start"]


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

    def floor(self, position: int) -> int:
        """Return the last border that is not behind a position."""
        if position < self.narrow_end:
            return position // self.narrow * self.narrow

        return self.narrow_end + (position - self.narrow_end) // self.wide * self.wide

    def most(self, num_keys: int) -> int:
        """Return the most partitions that `num_keys` neighbouring keys lie in, wherever they begin."""
        return -(-(num_keys - 1) // min(self.narrow, self.wide)) + 1

    def room(self, max_num_keys: int, window: int, num_rows: int) -> int:
        """Return how many partitions the keys may lie in that `num_rows` neighbouring rows of a sequence of
        at most `max_num_keys` keys see, each the last `window` keys; 0: all."""
        every = self.count(max_num_keys)
        return min(every, self.most(window + num_rows - 1)) if window > 0 else every


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
