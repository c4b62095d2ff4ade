"""Waiting and running sequences, in order of (priority, arrival)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from drift_sdk.scheduling.sequence import Sequence

__all__ = ["RunningSet", "WaitingQueue"]


class WaitingQueue:
    """Sequences without a slot, in order of (priority, arrival), the lowest first.

    A preempted sequence returns to its place in this order.
    """

    def __init__(self) -> None:
        # A sorted list: moving a few thousand pointers is cheaper than a heap's comparisons in Python, and a
        # cancelled sequence can be removed at once.
        self._sequences: list[Sequence] = []
        self.num_never_started: int = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self, most: int) -> list[Sequence]:
        """The first `most` sequences, or all."""
        return self._sequences[:most]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place in the order."""
        insort(self._sequences, sequence)
        self.num_never_started += sequence.started_at is None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is waiting."""
        index = bisect_left(self._sequences, sequence)
        while index < len(self._sequences) and self._sequences[index].order == sequence.order:
            if self._sequences[index] is sequence:
                del self._sequences[index]
                self.num_never_started -= sequence.started_at is None
                return

            index += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the order or a count is wrong, or a sequence has finished or has a slot."""
        assert self._sequences == sorted(self._sequences), "waiting sequences are out of order"
        num_never_started = sum(sequence.started_at is None for sequence in self._sequences)
        assert num_never_started == self.num_never_started, f"{self.num_never_started} counted as new"
        for sequence in self._sequences:
            assert sequence.finish is None, f"{sequence} has finished and waits"
            assert sequence.slot < 0 and not sequence.block_table, f"{sequence} waits with slot or blocks"


class RunningSet:
    """Sequences with a slot, in order of (priority, arrival), the lowest first."""

    def __init__(self, max_num_seqs: int) -> None:
        self.sequences: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    @property
    def lowest_priority(self) -> Sequence:
        """The last sequence in the order, which is preempted first. There must be one."""
        return self.sequences[-1]

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Give a sequence a free slot; there must be one."""
        sequence.slot = self._free_slots.pop()
        insort(self.sequences, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free the slot of a running sequence."""
        self.sequences.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def check_integrity(self) -> None:
        """Raise AssertionError if the order is wrong, or a slot is neither free nor held by one sequence."""
        assert self.sequences == sorted(self.sequences), "running sequences are out of order"
        slots = sorted([sequence.slot for sequence in self.sequences] + self._free_slots)
        assert slots == list(range(self._max_num_seqs)), f"slots held or free: {slots}"
