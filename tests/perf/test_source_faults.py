"""Faults that are planted to see whether tests notice them."""

from __future__ import annotations

from perf.source_faults import load_faults, occurrences


def test_text_of_every_fault_occurs_once() -> None:
    faults = load_faults()
    assert {fault.name: len(occurrences(fault.old)) for fault in faults} == {
        fault.name: 1 for fault in faults
    }
    assert all(fault.old != fault.new for fault in faults)
