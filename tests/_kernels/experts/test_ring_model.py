"""A model of the barriers of ring_products.cu: a warp copies and finishes items, eight warps multiply them.

Schedules are drawn: copies arrive in any order, and each warp may be held up for as long as others can run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from barrier_model import Barrier, PipelineError
from msgspec import Struct

Ready = Callable[[], bool]
NUM_WARPS, NUM_COPIES = 8, 2
NUM_SCHEDULES = 30


class Faults(Struct, frozen=True):
    """Faults of a ring, for tests of the model."""

    copies_before_reading: bool = False  # the sums of the stage
    arrives_before_writing: bool = False  # the sums of a warp
    ignores_parity: bool = False
    num_awaited: int = NUM_WARPS
    last_item_is_skipped: bool = False


class Ring:
    """The stages of a CTA that has some items."""

    def __init__(self, num_stages: int, num_items: int, faults: Faults) -> None:
        self.num_stages, self.num_items, self.faults = num_stages, num_items, faults
        self.full = [Barrier(1, 1) for _ in range(num_stages)]
        self.done = [Barrier(faults.num_awaited, faults.num_awaited) for _ in range(num_stages)]
        self.bytes: list[list[int | None]] = [[None] * num_stages for _ in range(NUM_COPIES)]  # items
        self.items: list[int | None] = [None] * num_stages
        self.sums: list[list[int | None]] = [[None] * NUM_WARPS for _ in range(num_stages)]
        self.copies: list[tuple[float, int, int]] = []  # priority, which copy, item
        self.is_known = False  # the first item
        self.finished: list[int] = []

    def run(self, schedule: random.Random) -> None:
        """Run a schedule to its end. Raises PipelineError."""
        warps = [self.copy_and_finish(schedule), *(self.multiply(warp) for warp in range(NUM_WARPS))]
        left = [(schedule.random(), warp, next(warp)) for warp in warps]
        while left or self.copies:
            ready = [entry for entry in left if entry[2]()]
            if not ready and not self.copies:
                raise PipelineError("no warp can run")
            entry = max(ready, default=None, key=lambda entry: entry[0])
            copy = max(self.copies, default=None)
            if entry is None or (copy is not None and copy[0] > entry[0]):
                assert copy is not None
                self.copies.remove(copy)
                self.deliver(*copy[1:])
                continue
            left.remove(entry)
            priority = entry[0] if schedule.random() < 0.95 else schedule.random()
            if (condition := next(entry[1], None)) is not None:
                left.append((priority, entry[1], condition))
        if self.finished != list(range(self.num_items)):
            raise PipelineError("items that were not finished")
        for stage in range(self.num_stages):
            num_phases = len(range(stage, self.num_items, self.num_stages))
            if (self.full[stage].phase, self.done[stage].phase) != (num_phases, num_phases):
                raise PipelineError("a wait without an arrival, or an arrival without a wait")

    def copy_next(self, item: int, schedule: random.Random) -> Iterator[Ready]:
        """Copies may arrive before the barrier expects them."""
        stage = item % self.num_stages
        for which in range(NUM_COPIES):
            self.bytes[which][stage] = None
            self.copies.append((schedule.random(), which, item))
            yield lambda: True
        self.items[stage] = item
        yield lambda: True
        self.full[stage].arrive(NUM_COPIES)

    def copy_and_finish(self, schedule: random.Random) -> Iterator[Ready]:
        yield lambda: True
        for stage in range(self.num_stages):
            if stage < self.num_items:
                yield from self.copy_next(stage, schedule)
            if stage == 0:
                self.is_known = True
        parity = stage = 0
        for item in range(self.num_items):
            if self.items[stage] != item:
                raise PipelineError(f"item {self.items[stage]} is finished in place of {item}")
            yield lambda stage=stage, parity=parity: self.done[stage].has_ended(parity)
            has_next = item + self.num_stages < self.num_items
            if has_next and self.faults.copies_before_reading:
                yield from self.copy_next(item + self.num_stages, schedule)
            for warp in range(NUM_WARPS):
                if self.sums[stage][warp] != item:
                    raise PipelineError(f"warp {warp} has not written its sums of item {item}")
                yield lambda: True
            if has_next and not self.faults.copies_before_reading:
                yield from self.copy_next(item + self.num_stages, schedule)
            self.finished.append(item)
            stage += 1
            if stage == self.num_stages:
                stage, parity = 0, parity ^ (not self.faults.ignores_parity)

    def deliver(self, which: int, item: int) -> None:
        stage = item % self.num_stages
        self.bytes[which][stage] = item
        self.full[stage].num_copies -= 1
        self.full[stage].settle()

    def multiply(self, warp: int) -> Iterator[Ready]:
        yield lambda: self.is_known
        parity = stage = 0
        for item in range(self.num_items - self.faults.last_item_is_skipped):
            if item > 0:
                yield lambda stage=stage, parity=parity: self.full[stage].has_ended(parity)
            self.read([self.items[stage]], item)
            if item == 0:
                yield lambda stage=stage, parity=parity: self.full[stage].has_ended(parity)
            for _ in range(2):  # at the beginning, and at the end of its products
                self.read([copies[stage] for copies in self.bytes], item)
                yield lambda: True
            if self.faults.arrives_before_writing:
                self.done[stage].arrive()
                yield lambda: True
            self.sums[stage][warp] = item
            yield lambda: True
            if not self.faults.arrives_before_writing:
                self.done[stage].arrive()
            stage += 1
            if stage == self.num_stages:
                stage, parity = 0, parity ^ (not self.faults.ignores_parity)

    def read(self, found: list[int | None], item: int) -> None:
        if any(each != item for each in found):
            raise PipelineError(f"a stage has {found}, not item {item}")


def is_right(num_stages: int, num_items: int, faults: Faults) -> bool:
    """Whether no drawn schedule fails."""
    try:
        for seed in range(NUM_SCHEDULES):
            Ring(num_stages, num_items, faults).run(random.Random(seed))
    except PipelineError:
        return False

    return True


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_ring_never_stands_still_nor_replaces_what_is_read(num_stages: int) -> None:
    for num_items in (0, 1, num_stages - 1, num_stages, num_stages + 1, 4 * num_stages + 1):
        assert is_right(num_stages, num_items, Faults()), f"{num_items} items"


@pytest.mark.parametrize(
    "faults",
    [
        Faults(copies_before_reading=True),
        Faults(arrives_before_writing=True),
        Faults(ignores_parity=True),
        Faults(num_awaited=NUM_WARPS - 1),
        Faults(num_awaited=NUM_WARPS + 1),
        Faults(last_item_is_skipped=True),
    ],
    ids=str,
)
def test_faults_are_found(faults: Faults) -> None:
    assert not is_right(3, 13, faults)


@pytest.mark.parametrize("num_tiles", [1, 16, 21, 40])
def test_items_are_taken_once_and_in_bands(num_tiles: int) -> None:
    """A model of `Items`: it starts anywhere and goes on as one that starts at the first item."""
    schedule = random.Random(num_tiles)
    for counts in ([0, 9, 0, 1, 24, 8, 0], [1], [0, 0, 65], [schedule.randrange(12) for _ in range(30)]):
        expected = [
            (expert, tile, first)
            for expert, count in enumerate(counts)
            for band in range(0, num_tiles, 16)
            for first in range(0, count, 8)
            for tile in range(band, min(band + 16, num_tiles))
        ]
        for start in range(len(expected)):
            end = min(start + 40, len(expected))
            assert list(items(counts, num_tiles, start, end)) == [
                (*entry, k == start or entry[0] != expected[k - 1][0] or entry[2] != expected[k - 1][2])
                for k, entry in enumerate(expected[start:end], start)
            ]


def items(counts: list[int], num_tiles: int, start: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
    """A CTA's, as `Items` finds them: expert, tile, first pair, and whether the pairs are others."""

    def enter(pair_tile: int) -> tuple[int, int]:
        begin = 0
        for expert, count in enumerate(counts):
            if begin + -(-count // 8) > pair_tile:
                return expert, begin * num_tiles
            begin += -(-count // 8)
        raise AssertionError("no such tile")

    expert, begin = enter(start // num_tiles)
    limit = begin + -(-counts[expert] // 8) * num_tiles
    band_items = -(-counts[expert] // 8) * 16
    place, following = start - begin, start
    band = place // band_items * 16
    size = min(16, num_tiles - band)
    tile, first = band + place % band_items % size, place % band_items // size * 8
    is_first = True
    while following < end:
        yield expert, tile, first, is_first
        following, tile, is_first = following + 1, tile + 1, False
        if following == end or tile < min(band + 16, num_tiles):
            continue
        first += 8
        has_pairs = first < counts[expert]
        is_first = has_pairs or counts[expert] > 8 or following == limit
        if not has_pairs:
            first, band = 0, band + 16
        if following == limit:
            band = 0
            expert, begin = enter(following // num_tiles)
            limit = begin + -(-counts[expert] // 8) * num_tiles
        tile = band
