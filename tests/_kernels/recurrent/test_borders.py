"""The positions of stored states."""

from __future__ import annotations

import pytest
import torch
from references.recurrent import move_borders_of_prompts_reference, move_borders_of_rows_reference

from drift_sdk._kernels.recurrent.gated_delta import move_borders_of_prompts, move_borders_of_rows

pytestmark = pytest.mark.kernel

NUMBERS = [0, 1, 3, 256, 257, 601]
"""A program has 256 entries."""


def drawn(number: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Borders of more slots than are moved, slots in no order with padding among them, and positions."""
    generator = torch.Generator().manual_seed(number)
    borders = torch.full((number + 5,), -9, dtype=torch.int32)
    slots = torch.randperm(number + 5, generator=generator)[:number].to(torch.int32)
    slots[2::5] = -1
    positions = torch.randint(0, 4096, (number,), generator=generator, dtype=torch.int32)
    first = torch.tensor([32, 31, 0, 33, 63, 64, 65, 2**30 + 31], dtype=torch.int32)[:number]
    positions[: len(first)] = first
    positions[slots < 0] = -7
    return borders.to(device), slots.to(device), positions.to(device)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("rows_per_slot", [1, 3])
def test_borders_move_to_the_first_rows(rows_per_slot: int, number: int, device: str) -> None:
    borders, slots, positions = drawn(number, device)
    # Later rows would move other borders elsewhere.
    row_slot = torch.full((number, rows_per_slot), number + 4, dtype=torch.int32, device=device)
    row_position = torch.full_like(row_slot, 999)
    row_slot[:, 0], row_position[:, 0] = slots, positions
    arguments = row_slot.flatten(), row_position.flatten(), rows_per_slot
    expected = borders.clone()
    move_borders_of_rows_reference(expected, *arguments)
    move_borders_of_rows(borders, *arguments)
    assert torch.equal(borders, expected)
    assert (borders == -9).sum() == 5 + (slots < 0).sum()


@pytest.mark.parametrize("number", NUMBERS)
def test_borders_move_to_the_ends_of_prompts(number: int, device: str) -> None:
    borders, slots, positions = drawn(number, device)
    counts = torch.arange(number, dtype=torch.int32, device=device) % 67
    first_rows = torch.full_like(counts, 12345)
    runs = torch.stack((slots, positions, first_rows, counts), dim=1)
    expected = borders.clone()
    move_borders_of_prompts_reference(expected, runs)
    move_borders_of_prompts(borders, runs)
    assert torch.equal(borders, expected)


def test_runs_end_before_at_and_behind_borders(device: str) -> None:
    """Runs without rows end where they start."""
    ends = {0: (0, 31), 1: (0, 32), 2: (31, 1), 3: (30, 1), 4: (32, 31), 5: (32, 33), 6: (64, 0), 7: (5, 100)}
    runs = [(slot, start, 0, count) for slot, (start, count) in ends.items()]
    borders = torch.full((9,), 17, dtype=torch.int32, device=device)
    move_borders_of_prompts(borders, torch.tensor(runs, dtype=torch.int32, device=device))
    assert borders.tolist() == [0, 32, 32, 0, 32, 64, 64, 96, 17]


def test_errors_name_the_argument(device: str) -> None:
    borders, rows = torch.zeros(4, dtype=torch.int32, device=device), torch.zeros(6, dtype=torch.int32)
    rows, runs = rows.to(device), torch.zeros(3, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"row_slot: \[6\] torch.int64: expected \[6\] torch.int32"):
        move_borders_of_rows(borders, rows.long(), rows, 2)
    with pytest.raises(ValueError, match=r"row_slot: \[6\] torch.int32: expected \[4\]"):
        move_borders_of_rows(borders, rows, rows, 4)
    with pytest.raises(ValueError, match=r"row_position: \[5\] torch.int32: expected \[6\]"):
        move_borders_of_rows(borders, rows, rows[1:], 2)
    with pytest.raises(ValueError, match="row_slot: strides"):
        move_borders_of_rows(borders, torch.zeros(12, dtype=torch.int32, device=device)[::2], rows, 2)
    with pytest.raises(ValueError, match="rows_per_slot=0"):
        move_borders_of_rows(borders, rows, rows, 0)
    for move in (
        lambda it: move_borders_of_rows(it, rows, rows, 2),
        lambda it: move_borders_of_prompts(it, runs),
    ):
        with pytest.raises(ValueError, match=r"borders: \[4\] torch.int64: expected \[4\] torch.int32"):
            move(borders.long())
        with pytest.raises(ValueError, match="borders: strides"):
            move(torch.zeros(8, dtype=torch.int32, device=device)[::2])
        with pytest.raises(ValueError, match=r"borders: \[2, 2\] torch.int32: expected \[4\]"):
            move(borders.view(2, 2))
    with pytest.raises(ValueError, match=r"runs: \[3, 3\] torch.int32: expected \[3, 4\]"):
        move_borders_of_prompts(borders, runs[:, 1:])
    with pytest.raises(ValueError, match="runs: strides"):
        move_borders_of_prompts(borders, torch.zeros(4, 3, dtype=torch.int32, device=device).T)
