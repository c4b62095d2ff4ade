"""The kernels at the beginning and the end of a replay, against their references and by hand."""

from __future__ import annotations

import random

import pytest
import torch
from references.slots import advance_reference, copy_masks_reference, enter_reference, show_drafts_reference

from drift_sdk._kernels.slots import HEADER_WORDS, SlotFlag, advance, copy_masks, enter, show_drafts

pytestmark = pytest.mark.kernel

POISON = torch.iinfo(torch.int32).max
NUM_ENTRIES = 3


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def filled(shape: tuple[int, ...] | int, value: int, device: str) -> torch.Tensor:
    return torch.full(
        shape if isinstance(shape, tuple) else (shape,), value, dtype=torch.int32, device=device
    )


class Inputs:
    """A ring of inputs in pinned memory, poisoned except for what `put` writes."""

    def __init__(self, max_updates: int, payload_words: int, device: str) -> None:
        self.max_updates = max_updates
        shape = (NUM_ENTRIES, HEADER_WORDS + 2 * max_updates + payload_words)
        self.ring = torch.full(shape, POISON, dtype=torch.int32, pin_memory=device == "cuda")
        self.next_entry, self.current_entry = filled(1, 0, device), filled(1, POISON, device)

    def put(self, entry: int, updates: dict[int, int], payload: list[int]) -> None:
        words = self.ring[entry]
        words.fill_(POISON)
        words[0] = len(updates)
        for index, (place, value) in enumerate(updates.items()):
            words[HEADER_WORDS + index] = place
            words[HEADER_WORDS + self.max_updates + index] = value

        first = HEADER_WORDS + 2 * self.max_updates
        words[first : first + len(payload)] = int32(payload, "cpu")

    def enter(self, payload: torch.Tensor, table_words: torch.Tensor) -> None:
        """Run `enter` on these, after its reference on copies of them, and compare."""
        given = (self.next_entry, self.current_entry, payload, table_words)
        expected = [tensor.clone() for tensor in given]
        enter_reference(self.ring, *expected, max_updates=self.max_updates)
        enter(self.ring, *given, max_updates=self.max_updates)
        assert all(map(torch.equal, given, expected))


# Payloads of no block, of less than one, of a whole one, of several; updates that fill their room.
@pytest.mark.parametrize(("max_updates", "payload_words"), [(1, 0), (5, 7), (8, 1024), (12, 2500)])
def test_enter_reads_the_next_entry_of_each_replay(max_updates: int, payload_words: int, device: str) -> None:
    rng = random.Random(payload_words)
    inputs = Inputs(max_updates, payload_words + 3, device)
    words = filled(40, -1, device)
    expected = [-1] * 40
    for replay in range(2 * NUM_ENTRIES + 1):
        entry = replay % NUM_ENTRIES
        num_updates = [0, max_updates, rng.randint(0, max_updates)][replay % 3]
        places = rng.sample(range(40), num_updates)
        updates = {place: rng.randrange(-(2**31), 2**31) for place in places}
        payload = [rng.randrange(-(2**31), 2**31) for _ in range(payload_words)]
        inputs.put(entry, updates, payload)
        read = filled(payload_words + 2, -5, device)
        inputs.enter(read[:payload_words], words)
        assert inputs.next_entry.item() == entry  # until the replay has ended
        advanced = inputs.next_entry.clone()
        advance_reference(advanced, NUM_ENTRIES)
        advance(inputs.next_entry, NUM_ENTRIES)
        assert torch.equal(inputs.next_entry, advanced)
        for place, value in updates.items():
            expected[place] = value

        assert words.tolist() == expected
        assert read.tolist() == [*payload, -5, -5]
        assert inputs.current_entry.item() == entry
        assert inputs.next_entry.item() == (replay + 1) % NUM_ENTRIES  # never outside of the ring


@pytest.mark.parametrize("num_words", [1, 30, 1500])
@pytest.mark.parametrize("rows_per_slot", [1, 3])
def test_copy_masks_with_one_mask_a_slot(rows_per_slot: int, num_words: int, device: str) -> None:
    max_slots, entry = 5, 2
    generator = torch.Generator().manual_seed(num_words)
    ring = torch.randint(-(2**31), 2**31, (NUM_ENTRIES, max_slots, num_words), generator=generator)
    ring = ring.to(torch.int32).pin_memory() if device == "cuda" else ring.to(torch.int32)
    flags = int32([31, 31 - SlotFlag.CONSTRAINT, SlotFlag.CONSTRAINT, 0], device)
    slots = [2, -1, 1, 0]
    row_slot = [slot for slot in slots for _ in range(rows_per_slot)]
    masks = filled((len(row_slot), num_words), POISON, device)
    reference = masks.clone()
    given = (int32(row_slot, device), flags, ring, int32([entry], device))
    copy_masks(*given, masks, rows_per_mask=rows_per_slot)
    copy_masks_reference(*given, reference, rows_per_mask=rows_per_slot)
    assert torch.equal(masks, reference)
    for row, slot in enumerate(row_slot):
        is_constrained = slot in (0, 2)
        expected = ring[entry, row // rows_per_slot] if is_constrained else filled(num_words, POISON, "cpu")
        assert torch.equal(masks[row].cpu(), expected)


@pytest.mark.parametrize("num_words", [3, 1500])
def test_copy_masks_with_one_mask_a_row(num_words: int, device: str) -> None:
    source = torch.arange(6 * num_words, dtype=torch.int32).view(6, num_words)
    source = source.pin_memory() if device == "cuda" else source
    flags = int32([31 - SlotFlag.CONSTRAINT, SlotFlag.CONSTRAINT], device)
    row_slot = [1, 1, -1, 0, 0, 1]
    masks = filled((6, num_words), POISON, device)
    reference = masks.clone()
    copy_masks(int32(row_slot, device), flags, source, None, masks, rows_per_mask=1)
    copy_masks_reference(int32(row_slot, device), flags, source, None, reference, rows_per_mask=1)
    assert torch.equal(masks, reference)
    for row, slot in enumerate(row_slot):
        expected = source[row] if slot == 1 else filled(num_words, POISON, "cpu")
        assert torch.equal(masks[row].cpu(), expected)


@pytest.mark.parametrize("num_rows", [1, 16, 21, 1536])
def test_show_drafts_writes_tokens_and_ends_the_replay(num_rows: int, device: str) -> None:
    rng = random.Random(num_rows)
    slots = [rng.choice([-1, 0, 3]) for _ in range(num_rows)]
    tokens = [rng.randrange(2**31) for _ in range(num_rows)]
    is_pinned = device == "cuda"
    output_ring = torch.full((NUM_ENTRIES, num_rows + 2), POISON, dtype=torch.int32, pin_memory=is_pinned)
    for index in range(NUM_ENTRIES):
        next_entry, expected_entry = filled(1, index, device), filled(1, index, device)
        given = (int32(slots, device), int32(tokens, device))
        reference = output_ring.clone()
        show_drafts_reference(*given, reference, int32([1], device), expected_entry)
        show_drafts(*given, output_ring, int32([1], device), next_entry)
        assert next_entry.item() == expected_entry.item() == (index + 1) % NUM_ENTRIES
        assert torch.equal(output_ring, reference)
    expected = [token if slot >= 0 else -1 for slot, token in zip(slots, tokens, strict=True)]
    assert output_ring[1].tolist() == [*expected, POISON, POISON]
    assert bool((output_ring[[0, 2]] == POISON).all())


def test_ring_kernels_name_wrong_arguments(device: str) -> None:
    inputs, words = Inputs(2, 3, device), filled(9, 0, device)
    with pytest.raises(ValueError, match="payload: 4 words: expected at most the entry's 3"):
        enter(inputs.ring, inputs.next_entry, inputs.current_entry, words[:4], words, max_updates=2)
    with pytest.raises(ValueError, match=r"table_words: \[9\] torch.int64: expected \[9\] torch.int32"):
        enter(inputs.ring, inputs.next_entry, inputs.current_entry, words[:3], words.long(), max_updates=2)
    with pytest.raises(ValueError, match=r"next_entry: \[2\] torch.int32: expected \[1\] torch.int32"):
        advance(words[:2], 3)
    with pytest.raises(ValueError, match=r"source: \[3, 2\] torch.int32: expected \[3, 3\] torch.int32"):
        copy_masks(
            words[:3], words, filled((3, 2), 0, device), None, filled((3, 3), 0, device), rows_per_mask=1
        )
    with pytest.raises(ValueError, match="output_ring: 8 words an entry: expected at least 9"):
        show_drafts(words, words, filled((3, 8), 0, device), words[:1], words[:1])
