"""The pool of free blocks against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drift_sdk.scheduling.blocks import BlockPool

NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool against the set of allocated blocks, `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: set[int] = set()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, NUM_BLOCKS - len(self.held)))
        block_ids = self.pool.allocate(count)
        assert len(block_ids) == len(set(block_ids)) == count
        assert not self.held.intersection(block_ids)
        assert all(0 <= block_id < NUM_BLOCKS for block_id in block_ids)
        self.held.update(block_ids)

    @rule()
    def allocate_too_many(self) -> None:
        with pytest.raises(AssertionError, match="free"):
            self.pool.allocate(NUM_BLOCKS - len(self.held) + 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        self.pool.free(block_ids)
        self.held -= block_ids

    @precondition(lambda self: len(self.held) < NUM_BLOCKS)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(range(NUM_BLOCKS)) - self.held)))
        with pytest.raises(AssertionError, match=f"block {block_id} is free already"):
            self.pool.free([block_id])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS - len(self.held)
        assert {i for i in range(NUM_BLOCKS) if not self.pool.is_free(i)} == self.held


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
