"""The rows of a step against the reference and by hand."""

from __future__ import annotations

import random

import pytest
import torch
from references.slots import gather_rows_reference

from drift_sdk._kernels.slots import SlotState, gather_rows

pytestmark = pytest.mark.kernel

POISON = torch.iinfo(torch.int32).max


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def gathered(
    slots: list[int], max_drafts: list[int], state: SlotState, rows_per_slot: int, device: str
) -> list[list[int]]:
    """row_slot, row_token, row_position, which are the reference's."""
    shape = (3, len(slots) * rows_per_slot + 1)
    rows = torch.full(shape, POISON, dtype=torch.int32, device=device)
    reference = rows.clone()
    given = (int32(slots, device), int32(max_drafts, device), state)
    gather_rows(*given, *rows[:, :-1])
    gather_rows_reference(*given, *reference[:, :-1])
    assert torch.equal(rows, reference)
    assert rows[:, -1].tolist() == [POISON] * 3
    return rows[:, :-1].tolist()


def state_of(slots: list[tuple[int, int, int, int]], device: str) -> SlotState:
    """The state of slots with these (length, last_token, finish, max_length)."""
    return SlotState(*(int32(column, device) for column in zip(*slots, strict=True)))


@pytest.mark.parametrize("rows_per_slot", [1, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 5, 33])
def test_gather_rows_of_random_slots(num_slots: int, rows_per_slot: int, device: str) -> None:
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
                # There is room for the token behind the last row, and for no more.
                is_row = depth == 0 or (depth <= most and length + depth < max_length)
                expected = [slot if is_row else -1, -1 if depth else token, length - 1 + depth]
                assert [column[row] for column in found] == expected
            row += 1


def test_gather_rows_leaves_room_for_the_token_behind_the_last_draft(device: str) -> None:
    state = state_of([(5, 70, 0, 6), (5, 71, 0, 7), (5, 72, 0, 9), (5, 73, 1, 9), (5, 74, 2, 9)], device)
    slots, tokens, positions = gathered([2, 1, 0, -1, 3, 4], [9, 9, 9, 9, 9, 9], state, 4, device)
    assert slots == [2, 2, 2, 2, 1, 1, -1, -1, 0, -1, -1, -1] + [-1] * 12
    assert tokens == [72, -1, -1, -1, 71, -1, -1, -1, 70, -1, -1, -1] + [-1] * 12
    assert positions[:4] == [4, 5, 6, 7]
    slots, _, _ = gathered([2, 1], [0, 1], state, 4, device)
    assert slots == [2, -1, -1, -1, 1, 1, -1, -1]


def test_gather_rows_names_wrong_arguments(device: str) -> None:
    row, state = int32([0] * 4, device), state_of([(1, 2, 0, 3)], device)
    with pytest.raises(ValueError, match="row_slot: 4 rows: expected a multiple of 3"):
        gather_rows(row[:3], row[:3], state, row, row, row)
    with pytest.raises(ValueError, match=r"row_token: \[3\] torch.int32: expected \[4\] torch.int32"):
        gather_rows(row[:2], row[:2], state, row, row[:3], row)
    with pytest.raises(ValueError, match=r"max_length: \[1\] torch.int64: expected \[1\] torch.int32"):
        wrong = SlotState(state.length, state.last_token, state.finish, state.max_length.long())
        gather_rows(row[:2], row[:2], wrong, row, row, row)
