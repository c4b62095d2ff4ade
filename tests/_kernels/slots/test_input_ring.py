from __future__ import annotations

import random

import pytest
import torch

from drift_sdk._kernels.slots.input_ring import (
    HEADER_WORDS,
    advance,
    copy_masks,
    enter,
    gather_rows,
    show_drafts,
)
from drift_sdk._kernels.slots.slot_columns import SlotFlag, SlotState

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
    """A ring in pinned memory, full of garbage but for what is put into an entry."""

    def __init__(self, max_updates: int, payload_words: int, device: str) -> None:
        self.max_updates = max_updates
        shape = (NUM_ENTRIES, HEADER_WORDS + 2 * max_updates + payload_words)
        self.ring = torch.full(shape, POISON, dtype=torch.int32, pin_memory=device == "cuda")
        self.next_index, self.current = filled(1, 0, device), filled(1, POISON, device)

    def put(self, entry: int, updates: dict[int, int], payload: list[int]) -> None:
        words = self.ring[entry]
        words.fill_(POISON)
        words[0] = len(updates)
        for index, (place, value) in enumerate(updates.items()):
            words[HEADER_WORDS + index] = place
            words[HEADER_WORDS + self.max_updates + index] = value

        first = HEADER_WORDS + 2 * self.max_updates
        words[first : first + len(payload)] = int32(payload, "cpu")

    def enter(self, inbox: torch.Tensor, words: torch.Tensor) -> None:
        enter(self.ring, self.next_index, self.current, inbox, words, max_updates=self.max_updates)


# Payloads of no chunk, of less than one, of a whole one, of several; updates that fill their room.
@pytest.mark.parametrize(("max_updates", "payload_words"), [(1, 0), (5, 7), (8, 1024), (12, 2500)])
def test_each_replay_has_the_next_entry(max_updates: int, payload_words: int, device: str) -> None:
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
        inbox = filled(payload_words + 2, -5, device)
        inputs.enter(inbox[:payload_words], words)
        assert inputs.next_index.item() == entry  # until the replay has ended
        advance(inputs.next_index, NUM_ENTRIES)
        for place, value in updates.items():
            expected[place] = value

        assert words.tolist() == expected
        assert inbox.tolist() == [*payload, -5, -5]
        assert inputs.current.item() == entry
        assert inputs.next_index.item() == (replay + 1) % NUM_ENTRIES  # never outside of the ring


def gathered(
    slots: list[int], max_drafts: list[int], state: SlotState, rows_per_slot: int, device: str
) -> list[list[int]]:
    """row_slot, row_token, row_position."""
    rows = filled((3, len(slots) * rows_per_slot + 1), POISON, device)
    gather_rows(int32(slots, device), int32(max_drafts, device), state, *rows[:, :-1])
    assert rows[:, -1].tolist() == [POISON] * 3
    return rows[:, :-1].tolist()


def state_of(slots: list[tuple[int, int, int, int]], device: str) -> SlotState:
    """length, last_token, finish, max_length of each."""
    return SlotState(*(int32(column, device) for column in zip(*slots, strict=True)))


@pytest.mark.parametrize("rows_per_slot", [1, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 5, 33])
def test_rows_of_random_slots(num_slots: int, rows_per_slot: int, device: str) -> None:
    rng = random.Random(num_slots * 10 + rows_per_slot)
    table = []
    for _ in range(num_slots + 3):
        length = rng.randint(1, 30)
        table.append((length, rng.randrange(100), rng.choice([0, 0, 0, 1, 2]), length + rng.randint(1, 5)))

    slots = [slot if rng.random() < 0.8 else -1 for slot in rng.sample(range(num_slots + 3), num_slots)]
    max_drafts = [rng.randint(0, 5) for _ in slots]
    found = gathered(slots, max_drafts, state_of(table, device), rows_per_slot, device)
    row = 0
    for slot, most in zip(slots, max_drafts, strict=True):
        length, token, finish, max_length = table[slot]
        for depth in range(rows_per_slot):
            if slot < 0 or finish:
                assert [column[row] for column in found][:2] == [-1, -1]
            else:
                # The token behind the last row is the last that there is room for.
                is_row = depth == 0 or (depth <= most and length + depth < max_length)
                expected = [slot if is_row else -1, -1 if depth else token, length - 1 + depth]
                assert [column[row] for column in found] == expected
            row += 1


def test_a_slot_may_draft_as_far_as_there_is_room(device: str) -> None:
    state = state_of([(5, 70, 0, 6), (5, 71, 0, 7), (5, 72, 0, 9), (5, 73, 1, 9), (5, 74, 2, 9)], device)
    slots, tokens, positions = gathered([2, 1, 0, -1, 3, 4], [9, 9, 9, 9, 9, 9], state, 4, device)
    assert slots == [2, 2, 2, 2, 1, 1, -1, -1, 0, -1, -1, -1] + [-1] * 12
    assert tokens == [72, -1, -1, -1, 71, -1, -1, -1, 70, -1, -1, -1] + [-1] * 12
    assert positions[:4] == [4, 5, 6, 7]
    slots, _, _ = gathered([2, 1], [0, 1], state, 4, device)
    assert slots == [2, -1, -1, -1, 1, 1, -1, -1]


@pytest.mark.parametrize("num_words", [1, 30, 1500])
@pytest.mark.parametrize("rows_per_slot", [1, 3])
def test_masks_of_slots_under_a_constraint(rows_per_slot: int, num_words: int, device: str) -> None:
    max_slots, entry = 5, 2
    generator = torch.Generator().manual_seed(num_words)
    ring = torch.randint(-(2**31), 2**31, (NUM_ENTRIES, max_slots, num_words), generator=generator)
    ring = ring.to(torch.int32).pin_memory() if device == "cuda" else ring.to(torch.int32)
    flags = int32([31, 31 - SlotFlag.CONSTRAINT, SlotFlag.CONSTRAINT, 0], device)
    slots = [2, -1, 1, 0]
    row_slot = [slot for slot in slots for _ in range(rows_per_slot)]
    masks = filled((len(row_slot), num_words), POISON, device)
    copy_masks(
        int32(row_slot, device), flags, ring, int32([entry], device), masks, rows_per_mask=rows_per_slot
    )
    for row, slot in enumerate(row_slot):
        is_constrained = slot in (0, 2)
        expected = ring[entry, row // rows_per_slot] if is_constrained else filled(num_words, POISON, "cpu")
        assert torch.equal(masks[row].cpu(), expected)


@pytest.mark.parametrize("num_words", [3, 1500])
def test_masks_of_every_row_under_a_constraint(num_words: int, device: str) -> None:
    source = torch.arange(6 * num_words, dtype=torch.int32).view(6, num_words)
    source = source.pin_memory() if device == "cuda" else source
    flags = int32([31 - SlotFlag.CONSTRAINT, SlotFlag.CONSTRAINT], device)
    row_slot = [1, 1, -1, 0, 0, 1]
    masks = filled((6, num_words), POISON, device)
    copy_masks(int32(row_slot, device), flags, source, None, masks, rows_per_mask=1)
    for row, slot in enumerate(row_slot):
        expected = source[row] if slot == 1 else filled(num_words, POISON, "cpu")
        assert torch.equal(masks[row].cpu(), expected)


@pytest.mark.parametrize("num_rows", [1, 16, 21, 1536])
def test_the_host_sees_drafts(num_rows: int, device: str) -> None:
    rng = random.Random(num_rows)
    slots = [rng.choice([-1, 0, 3]) for _ in range(num_rows)]
    tokens = [rng.randrange(2**31) for _ in range(num_rows)]
    outbox = torch.full((NUM_ENTRIES, num_rows + 2), POISON, dtype=torch.int32, pin_memory=device == "cuda")
    for index in range(len(outbox)):
        next_index = filled(1, index, device)
        show_drafts(int32(slots, device), int32(tokens, device), outbox, int32([1], device), next_index)
        assert next_index.item() == (index + 1) % len(outbox)
    expected = [token if slot >= 0 else -1 for slot, token in zip(slots, tokens, strict=True)]
    assert outbox[1].tolist() == [*expected, POISON, POISON]
    assert bool((outbox[[0, 2]] == POISON).all())
