"""Entries of a ring: each has its own input, masks and results."""

from __future__ import annotations

import numpy as np
from interpreted_device import InterpretedDevice

from drift_sdk._kernels.slots import HEADER_WORDS
from drift_sdk.execution.device.resources import Ring, RingSizes
from drift_sdk.execution.device.slot_table import NO_UPDATES

SIZES = RingSizes(
    num_entries=3,
    max_updates=2,
    payload_words=4,
    record_words=5,
    max_slots=2,
    num_draft_masks=1,
    mask_words=1,
)


class Replay:
    def launch(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_parts_of_entries_are_those_of_the_rings_tensors() -> None:
    ring = Ring(InterpretedDevice(), SIZES)
    first_payload = HEADER_WORDS + 2 * SIZES.max_updates
    for turn in range(2 * SIZES.num_entries):
        entry = ring.acquire(NO_UPDATES)
        assert entry == turn % SIZES.num_entries
        ring.payload(entry)[:] = 100 + turn
        ring.mask(entry)[:] = 200 + turn
        assert ring.input[entry, first_payload:].tolist() == [100 + turn] * SIZES.payload_words
        assert ring.masks[entry].flatten().tolist() == [200 + turn] * SIZES.max_slots
        ring.start(entry, Replay())
        ring.output[entry] = 300 + turn
        assert ring.wait(entry).tolist() == ring.results(entry).words.tolist() == [300 + turn] * 5
        ring.results(entry).is_pending = False


def test_updates_of_an_earlier_replay_are_not_applied_again() -> None:
    ring = Ring(InterpretedDevice(), SIZES)
    updates = np.array([7, 9]), np.array([70, 90], np.int32)
    for turn in range(SIZES.num_entries + 1):
        entry = ring.acquire(NO_UPDATES if turn == SIZES.num_entries else updates)
        words = ring.input[entry].tolist()
        if turn < SIZES.num_entries:
            assert words[0] == 2
            assert words[HEADER_WORDS : HEADER_WORDS + 2] == [7, 9]
            assert words[HEADER_WORDS + 2 : HEADER_WORDS + 4] == [70, 90]
        else:
            assert words[0] == 0
        ring.start(entry, Replay())
        ring.results(entry).is_pending = False
