from __future__ import annotations

from bisect import insort

from drift_sdk.scheduling.sequence import Sequence

__all__ = ["RunningSet"]


class RunningSet:
    """Sequences with a slot, best (priority, arrival) first."""

    def __init__(self, max_num_seqs: int) -> None:
        self.sequences: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    @property
    def worst(self) -> Sequence:
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
