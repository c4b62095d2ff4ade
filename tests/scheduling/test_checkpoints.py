"""The pool of places for checkpoints."""

from __future__ import annotations

import pytest

from drift_sdk.scheduling.blocks import CheckpointPool
from drift_sdk.scheduling.prefix import PrefixNode


def holder(pool: CheckpointPool) -> PrefixNode:
    node = PrefixNode(None, (), 0)
    place = pool.allocate()
    assert place is not None
    pool.attach(node, place)
    return node


def test_the_least_recently_used_holder_loses_its_place() -> None:
    pool = CheckpointPool(3)
    first, second, third = nodes = [holder(pool) for _ in range(3)]
    assert sorted(node.checkpoint for node in nodes) == [0, 1, 2]
    places = [second.checkpoint, third.checkpoint, first.checkpoint]
    pool.use(first)
    assert [pool.allocate() for _ in range(3)] == places
    assert [node.checkpoint for node in nodes] == [-1, -1, -1]
    assert pool.num_held == 0
    pool.check_integrity(nodes, places)


def test_planned_places_are_not_taken() -> None:
    pool = CheckpointPool(2)
    places = [pool.allocate(), pool.allocate()]
    assert sorted(place for place in places if place is not None) == [0, 1]
    assert pool.allocate() is None
    pool.free(1)
    assert pool.allocate() == 1
    assert CheckpointPool(0).allocate() is None


def test_taken_places_are_free_once_returned() -> None:
    pool = CheckpointPool(1)
    node = holder(pool)
    assert pool.take(node) == 0
    assert (node.checkpoint, pool.num_held) == (-1, 0)
    pool.check_integrity([node], [0])
    pool.free(0)
    pool.check_integrity([node], [])


def test_a_holder_has_one_place() -> None:
    pool = CheckpointPool(2)
    node = holder(pool)
    place = pool.allocate()
    assert place is not None
    with pytest.raises(AssertionError, match="the place 1 for a holder of 0"):
        pool.attach(node, place)


def test_integrity_finds_lost_and_shared_places() -> None:
    pool = CheckpointPool(2)
    node = holder(pool)
    with pytest.raises(AssertionError, match="LRU order differ"):
        pool.check_integrity([], [])
    with pytest.raises(AssertionError, match="planned or held"):
        pool.check_integrity([node], [1])
    pool.free(node.checkpoint)
    with pytest.raises(AssertionError, match="planned or held"):
        pool.check_integrity([node], [])
