"""Rows, tiles and kept outputs of a draft, against their references."""

from __future__ import annotations

import pytest
import torch
from references.draft import (
    chunk_rows_reference,
    draft_tiles_reference,
    keep_last_rows_reference,
    round_rows_reference,
)

from drift_sdk._kernels.draft.draft_rows import (
    chunk_rows,
    draft_tiles,
    keep_last_rows,
    num_draft_tiles,
    round_rows,
)

pytestmark = pytest.mark.kernel

GARBAGE = 2**31 - 1


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def columns(num_rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    column = ints([GARBAGE] * num_rows, device)
    return column, column.clone(), column.clone()


def assert_rows(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], device: str
) -> list[tuple[int, ...]]:
    """Check that slots are equal, and of live rows tokens and positions. Returns the live rows."""
    assert torch.equal(found[0], expected[0])
    is_live = found[0] >= 0
    for column, other in zip(found, expected, strict=True):
        assert torch.equal(column[is_live], other[is_live])

    return list(zip(*(column[is_live].tolist() for column in found), strict=True))


def test_round_rows_are_those_emitted(device: str) -> None:
    """Slots with all rows, with fewer drafts, with only the first row emitted; padding; one that has
    ended."""
    slot = ints([3, 3, 3, 0, 0, -1, 1, 1, 1, -1, -1, -1, 4, 4, 4], device)
    position = ints([9, 10, 11, 5, 6, 7, 70, 71, 72, *[GARBAGE - 1] * 3, 0, 1, 2], device)
    chosen = ints([11, 12, 13, 21, 22, -1, 31, 32, 33, -1, -1, -1, 41, 42, 43], device)
    emitted = ints([3, 2, 1, 0, 0], device)
    out = columns(15, device)
    round_rows(slot, position, chosen, emitted, out)
    rows = assert_rows(out, round_rows_reference(slot, position, chosen, emitted), device)
    assert rows == [(3, 11, 10), (3, 12, 11), (3, 13, 12), (0, 21, 6), (0, 22, 7), (1, 31, 71)]


@pytest.mark.parametrize("num_rows", [12, 300])
def test_chunk_rows_pair_with_the_next_token(num_rows: int, device: str) -> None:
    """A chunk with more to come, one that is the last of its prompt, gaps, and chunks after a prefix hit."""
    padding = num_rows - 10
    slot = ints([2, 2, 2, -1, 0, 0, 0, 0, 5, -1] + [-1] * padding, device)
    token = ints([10, 11, 12, GARBAGE, 20, 21, 22, 23, 50, GARBAGE] + [GARBAGE] * padding, device)
    position = ints([4, 5, 6, GARBAGE, 0, 1, 2, 3, 16, GARBAGE] + [GARBAGE] * padding, device)
    following = ints([11, 12, 13, GARBAGE, 21, 22, 23, -1, -1, -1] + [-1] * padding, device)
    last_token = ints([99, 1, 1, 1, 1, 77], device)
    hits = ints([-1, 8, 0, -1], device)
    out = columns(num_rows + 4, device)
    arguments = (slot, token, position, following, hits, last_token)
    chunk_rows(*arguments, out)
    rows = assert_rows(out, chunk_rows_reference(*arguments), device)
    assert rows == [
        *[(2, 11, 5), (2, 12, 6), (2, 13, 7)],
        *[(0, 21, 1), (0, 22, 2), (0, 23, 3), (0, 99, 4)],
        *[(5, 77, 17), (5, 50, 16), (2, 10, 4)],
    ]


@pytest.mark.parametrize(
    ("chunks", "tile_rows"),
    [
        ([(1, 40, 32)], 16),
        ([(7, 5, 1), (-1, 0, 3), (0, 0, 16), (3, 9, 1), (4, 9, 1), (2, 100, 30), (-1, 0, 6)], 16),
        ([(-1, 0, 48)], 16),
        ([(slot, slot, 1) for slot in range(40)], 16),
        ([(6, 0, 900), (2, 7, 300)], 128),
    ],
)
def test_draft_tiles_equal_reference(chunks: list[tuple[int, int, int]], tile_rows: int, device: str) -> None:
    slots = [slot for slot, _, size in chunks for _ in range(size)]
    positions = [start + row for _, start, size in chunks for row in range(size)]
    num_single = 40
    single = [-1] * num_single
    single[1], single[3] = 5, 8
    slots, positions = slots + single, positions + list(range(num_single))
    num_tiles = num_draft_tiles(len(slots) - num_single, num_single, tile_rows)
    tiles = torch.full((num_tiles, 4), GARBAGE, dtype=torch.int32, device=device)
    row_slot, row_position = ints(slots, device), ints(positions, device)
    draft_tiles(row_slot, row_position, tiles, num_single=num_single, tile_rows=tile_rows)
    expected = draft_tiles_reference(row_slot, row_position, num_single=num_single, tile_rows=tile_rows)
    found = tiles.tolist()
    assert all(tile[0] < GARBAGE for tile in found)
    assert [tile for tile in found if tile[0] >= 0] == expected
    rows = [(slot, first + j, position + j) for slot, first, size, position in expected for j in range(size)]
    live = [(slot, row, positions[row]) for row, slot in enumerate(slots) if slot >= 0]
    assert sorted(rows, key=lambda row: row[1]) == live


def test_keep_last_rows_copies_the_last_row_of_each_slot(device: str) -> None:
    slots = ints([2, 2, -1, -1, 0, 4, 4, 4], device)
    output = torch.randn(8, 20, device=device)
    state = torch.full((5, 20), torch.nan, device=device)
    expected = state.clone()
    keep_last_rows(slots, output, state)
    keep_last_rows_reference(slots, output, expected)
    assert torch.equal(state.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(state[[2, 0, 4]], output[[1, 4, 7]])
    assert state[[1, 3]].isnan().all()


def test_draft_kernels_name_wrong_arguments(device: str) -> None:
    row, short = ints([0] * 6, device), ints([0] * 4, device)
    with pytest.raises(ValueError, match="row_slot: 6 rows: expected a multiple of 4"):
        round_rows(row, row, row, short, columns(6, device))

    with pytest.raises(ValueError, match=r"token: \[4\] .*: expected \[6\]"):
        round_rows(row, row, row, ints([1, 1], device), (row, short, row))

    with pytest.raises(ValueError, match=r"next_token: \[4\] .*: expected \[6\]"):
        chunk_rows(row, row, row, short, row, row, columns(12, device))

    with pytest.raises(ValueError, match=r"tiles: \[4\] .*: expected \[5, 4\]"):
        draft_tiles(row, row, short, num_single=2, tile_rows=16)

    with pytest.raises(ValueError, match=r"output: .* torch.float16: expected .* torch.float32"):
        keep_last_rows(row, torch.zeros(6, 4, device=device).half(), torch.zeros(1, 4, device=device))
