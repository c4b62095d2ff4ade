from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from drift_sdk.scheduling.sequence import Sequence

__all__ = ["RunningSet", "WaitingQueue"]


class WaitingQueue:
    """Sequences without a slot, best (priority, arrival) first. A preempted one finds its old place."""

    def __init__(self) -> None:
        # A sorted list: moving a few thousand pointers is cheaper than a heap's comparisons in Python, and
        # a cancelled sequence is really gone.
        self._sequences: list[Sequence] = []
        self.num_never_started = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence)
        self.num_never_started += sequence.started_at is None

    def peek(self) -> Sequence:
        return self._sequences[0]

    def pop(self) -> Sequence:
        sequence = self._sequences.pop(0)
        self.num_never_started -= sequence.started_at is None
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out if it is waiting."""
        index = bisect_left(self._sequences, sequence)
        while index < len(self._sequences) and self._sequences[index].order == sequence.order:
            if self._sequences[index] is sequence:
                del self._sequences[index]
                self.num_never_started -= sequence.started_at is None
                return

            index += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the order is lost, a count is wrong or somebody should not be here."""
        assert self._sequences == sorted(self._sequences), "waiting sequences are out of order"
        num_never_started = sum(sequence.started_at is None for sequence in self._sequences)
        assert num_never_started == self.num_never_started, f"{self.num_never_started} counted as new"
        for sequence in self._sequences:
            assert sequence.finish is None, f"{sequence} has finished and waits"
            assert sequence.slot < 0 and not sequence.block_table, f"{sequence} waits with slot or blocks"


class RunningSet:
    """Sequences with a slot, best (priority, arrival) first."""

    def __init__(self, max_num_seqs: int) -> None:
        self.sequences: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    @property
    def lowest_priority(self) -> Sequence:
        return self.sequences[-1]

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        insort(self.sequences, sequence)

    def remove(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def check_integrity(self) -> None:
        """Raise AssertionError if the order is lost or a slot has no or two holders."""
        assert self.sequences == sorted(self.sequences), "running sequences are out of order"
        slots = sorted([sequence.slot for sequence in self.sequences] + self._free_slots)
        assert slots == list(range(self._max_num_seqs)), f"slots held or free: {slots}"
