"""Borders at which the keys of a sequence are cut into partitions, each summed by itself."""

from __future__ import annotations

import triton.language as tl
from msgspec import Struct

from drift_sdk._kernels.common.device_function import device_function

__all__ = ["Partitions", "partition_of", "partition_start"]


class Partitions(Struct, frozen=True):
    """Borders at which the keys of a sequence are cut; part of the result's bits.

    Up to position `narrow_end`, partitions are `narrow` keys wide. Their width doubles there, and wherever
    the position has doubled, `num_doublings` times in all. They consist of tiles of `tile` keys. A program
    has at least one partition, so short contexts need narrow ones, to fill the GPU; long contexts need wide
    ones, which leave less to add up.

    In whole steps on an H200, for Llama-3.1-8B shapes, partitions of 64 keys were 0.9% faster than 128 for
    one short sequence and 0.5% slower for eight (perf/tried.md).
    """

    narrow: int = 128
    narrow_end: int = 2048
    num_doublings: int = 2
    tile: int = 64

    @classmethod
    def of_window(cls, window: int) -> Partitions:
        """Borders for rows that see only their last `window` keys; 0: all keys.

        Few keys need narrow partitions wherever they lie.
        """
        default = cls()
        return cls(num_doublings=0) if 0 < window <= default.narrow_end else default

    def __post_init__(self) -> None:
        if self.narrow % self.tile or self.narrow_end % (2 * self.narrow) or self.narrow_end <= 0:
            raise ValueError(
                f"{self}: expected whole tiles in a partition, and an even number of partitions to narrow_end"
            )

    def index(self, position: int) -> int:
        """Return the index of the partition that a position lies in."""
        doublings = sum(position >= self.narrow_end << index for index in range(self.num_doublings))
        return (position >> doublings) // self.narrow + doublings * (self.narrow_end // self.narrow // 2)

    def start(self, index: int) -> int:
        """Return the first position of a partition, given its index."""
        half = self.narrow_end // self.narrow // 2
        doublings = min(max(index // half - 1, 0), self.num_doublings)
        return (index - doublings * half) * self.narrow << doublings

    def count(self, num_keys: int) -> int:
        """Return how many partitions `num_keys` keys lie in."""
        return self.index(num_keys - 1) + 1 if num_keys > 0 else 0

    def floor(self, position: int) -> int:
        """Return the last border that is not behind a position."""
        return self.start(self.index(position))

    def most(self, num_keys: int) -> int:
        """Return the most partitions that `num_keys` neighbouring keys lie in, wherever they begin."""
        return -(-(num_keys - 1) // self.narrow) + 1

    def room(self, max_num_keys: int, window: int, num_rows: int) -> int:
        """Return how many partitions the keys may lie in that `num_rows` neighbouring rows of a sequence of
        at most `max_num_keys` keys see, each the last `window` keys; 0: all."""
        every = self.count(max_num_keys)
        return min(every, self.most(window + num_rows - 1)) if window > 0 else every


@device_function
def partition_of(position, NARROW: tl.constexpr, NARROW_END: tl.constexpr, NUM_DOUBLINGS: tl.constexpr):
    """Return the index of the partition that a position lies in."""
    doublings = position * 0
    for index in tl.static_range(NUM_DOUBLINGS):
        doublings += (position >= (NARROW_END << index)).to(tl.int32)
    return (position >> doublings) // NARROW + doublings * (NARROW_END // NARROW // 2)


@device_function
def partition_start(index, NARROW: tl.constexpr, NARROW_END: tl.constexpr, NUM_DOUBLINGS: tl.constexpr):
    """Return the first position of a partition, given its index."""
    HALF: tl.constexpr = NARROW_END // NARROW // 2
    doublings = tl.minimum(tl.maximum(index // HALF - 1, 0), NUM_DOUBLINGS)
    return (index - doublings * HALF) * NARROW << doublings
