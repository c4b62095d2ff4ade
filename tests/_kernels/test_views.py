"""Kernels of partial verification against their references: views, pending rows, shares and selection."""

from __future__ import annotations

import random

import pytest
import torch
from references.views import (
    block_shares_reference,
    note_round_reference,
    refresh_rows_reference,
    select_blocks_reference,
    view_blocks_reference,
)
from tolerances import assert_near

from drift_sdk._kernels.views import (
    Retrieval,
    block_shares,
    note_round,
    refresh_rows,
    select_blocks,
    view_blocks,
)
from drift_sdk.speculation import PartialVerification, ViewLayout

pytestmark = pytest.mark.kernel

POISON = torch.iinfo(torch.int32).max
DTYPES = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)
LAYOUTS = [
    PartialVerification(sink_tokens=1, retrieved_tokens=4, window_tokens=1, refresh_tokens=4).layout(4, 3),
    PartialVerification(sink_tokens=9, retrieved_tokens=23, window_tokens=6, refresh_tokens=7).layout(4, 1),
    PartialVerification(sink_tokens=2, retrieved_tokens=5, window_tokens=3, refresh_tokens=9).layout(1, 5),
]


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def retrieval(layout: ViewLayout, num_slots: int, device: str, seed: int) -> Retrieval:
    """Some slots leave out blocks, some do not."""
    rng = random.Random(seed)
    dropped = [rng.choice([0, 1, 5]) for _ in range(num_slots)]
    selected = [
        [
            sorted(rng.sample(range(layout.num_kept + number), layout.num_retrieved)) if number else
            [POISON] * layout.num_retrieved
            for number in dropped
        ]
        for _ in range(3)
    ]  # fmt: skip
    pending = [rng.randint(0, layout.refresh_tokens - layout.num_drafts - 1) for _ in range(num_slots)]
    tokens = [[rng.randrange(99) for _ in range(layout.refresh_tokens)] for _ in range(num_slots)]
    for row, number in zip(tokens, pending, strict=True):
        row[number:] = [POISON] * (layout.refresh_tokens - number)
    return Retrieval(*(int32(each, device) for each in (dropped, pending, tokens, selected)))


def round_rows(
    layout: ViewLayout, slots: list[int], device: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of slots, some of whose drafts are missing."""
    rng = random.Random(seed)
    rows = layout.num_drafts + 1
    columns: list[list[int]] = [[], [], []]
    for slot in slots:
        length, live = rng.randint(40, 60), rng.randint(1, rows)
        for depth in range(rows):
            columns[0].append(slot if depth < live else -1)
            columns[1].append(rng.randrange(99))
            columns[2].append(length + depth)
    slot, token, position = (int32(column, device) for column in columns)
    return slot, token, position


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_first_retrieved_and_last_blocks(layout: ViewLayout, device: str) -> None:
    state, rows = retrieval(layout, 6, device, 1), layout.num_drafts + 1
    slot, _, position = round_rows(layout, [4, -1, 0, 5, 2], device, 2)
    table = torch.randperm(6 * 90).view(6, 90).int().to(device)
    view = torch.full((3, 6, layout.num_blocks), POISON, dtype=torch.int32, device=device)
    places = torch.full_like(position, POISON)
    expected, expected_places = view.clone(), places.clone()
    view_blocks(slot, position, table, state, view, places, layout, rows_per_sequence=rows)
    view_blocks_reference(
        slot, position, table, state, expected, expected_places, layout, rows_per_sequence=rows
    )
    assert torch.equal(view, expected)
    assert torch.equal(places, expected_places)
    assert (view[:, 1] == POISON).all()


def test_views_of_all_blocks_are_the_block_table(device: str) -> None:
    layout = LAYOUTS[0]
    state = retrieval(layout, 2, device, 1)
    state.dropped.zero_()
    table = torch.randperm(40).view(2, 20).int().to(device)
    view = torch.full((3, 2, layout.num_blocks), POISON, dtype=torch.int32, device=device)
    slot, position = int32([1, 1, 0, 0], device), int32([9, 10, 3, 4], device)
    places = torch.empty_like(position)
    view_blocks(slot, position, table, state, view, places, layout, rows_per_sequence=2)
    assert torch.equal(places, position)
    assert torch.equal(view, table[None, :, : layout.num_blocks].expand(3, -1, -1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_of_a_refresh_begin_with_the_pending_ones(layout: ViewLayout, padding: int, device: str) -> None:
    state = retrieval(layout, 6, device, 3)
    slots = [4, -1, 0, 5]
    rows = round_rows(layout, slots, device, 4)
    each = layout.num_drafts + 1 + layout.refresh_tokens + padding
    found = tuple(torch.full((4 * each + 1,), POISON, dtype=torch.int32, device=device) for _ in range(3))
    expected = tuple(column.clone() for column in found)
    refresh_rows(rows, state, tuple(column[:-1] for column in found), layout, num_sequences=4)
    refresh_rows_reference(rows, state, tuple(column[:-1] for column in expected), num_sequences=4)
    for column, reference in zip(found, expected, strict=True):
        assert torch.equal(column, reference)
    live = (found[0][:each] >= 0).sum().item()
    assert live == int(state.pending[4]) + int((rows[0][: layout.num_drafts + 1] >= 0).sum())


@pytest.mark.parametrize("is_refresh", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accepted_rows_are_pending_until_a_refresh(layout: ViewLayout, is_refresh: bool, device: str) -> None:
    state, expected = retrieval(layout, 6, device, 5), retrieval(layout, 6, device, 5)
    rows = round_rows(layout, [4, -1, 0, 5], device, 6)
    emitted = int32([1, 0, layout.num_drafts + 1, min(2, layout.num_drafts + 1)], device)
    note_round(rows, emitted, state, layout, is_refresh=is_refresh)
    note_round_reference(rows, emitted, expected, layout, is_refresh=is_refresh)
    for found, reference in zip(
        (state.dropped, state.pending, state.pending_token),
        (expected.dropped, expected.pending, expected.pending_token),
        strict=True,
    ):
        assert torch.equal(found, reference)
    assert bool(state.pending[4] == 0) == is_refresh


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "heads", "group", "head_dim", "rows"),
    [(4, 2, 2, 16, 4), (1, 1, 3, 8, 2), (64, 2, 1, 24, 1), (16, 1, 8, 16, 3)],
)
def test_shares_of_blocks_add_to_one_for_each_row_and_head(
    block_size: int, heads: int, group: int, head_dim: int, rows: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator(device).manual_seed(7)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    lengths, query_rows = [131, 3, 70], rows + 2
    max_blocks = -(-max(lengths) // block_size) + 2
    keys = torch.full((4 * max_blocks, heads, block_size, head_dim), torch.nan, dtype=dtype, device=device)
    table = torch.randperm(4 * max_blocks).view(4, max_blocks).int().to(device)
    row_slot = torch.full((4 * rows,), -1, dtype=torch.int32, device=device)
    row_position = torch.full_like(row_slot, POISON)
    num_live = []
    for sequence, length in enumerate(lengths):
        live = min(rows, 1 + sequence)
        num_live.append(live)
        row_slot[sequence * rows : sequence * rows + live] = sequence
        first = length - live
        row_position[sequence * rows : sequence * rows + live] = int32(list(range(first, length)), device)
        for position in range(length):
            keys[table[sequence, position // block_size], :, position % block_size] = randn(heads, head_dim)
    query = randn(4 * query_rows, heads * group, head_dim)
    sums = torch.full((4, heads, max_blocks, rows * group), torch.nan, device=device)
    shares = torch.full((4, heads, max_blocks), torch.nan, device=device)
    block_shares(query, keys, table, row_slot, row_position, sums, shares, num_sequences=4)
    expected = block_shares_reference(query, keys, table, row_slot, row_position, num_sequences=4)
    for sequence, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        found = shares[sequence, :, :num_blocks]
        assert_near(found, expected[sequence, :, :num_blocks], inner=head_dim * length)
        whole = torch.full((heads,), float(group * num_live[sequence]), device=device)
        assert_near(found.sum(1), whole, inner=head_dim * length)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_largest_shares_are_selected_in_order(layout: ViewLayout, is_tied: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(9)
    max_blocks = 77
    shares = torch.rand((4, 2, max_blocks), generator=generator)
    if is_tied:
        shares = (shares * 3).floor() / 4
    shares = shares.to(device)
    rows = layout.num_drafts + 1
    row_slot = int32([3, -1, 0, 2], device).repeat_interleave(rows)
    newest = [max_blocks * layout.block_size - 9, 5, layout.capacity - 1, layout.capacity + layout.block_size]
    row_position = int32([position + depth for position in newest for depth in range(rows)], device)
    for sequence, position in enumerate(newest):
        shares[sequence, :, position // layout.block_size + 1 :] = torch.nan
    shares[0, 0, layout.num_sinks + 1] = torch.nan  # counts as none
    selected = torch.full((4, layout.num_retrieved), POISON, dtype=torch.int32, device=device)
    expected = selected.clone()
    select_blocks(shares, row_slot, row_position, selected, layout)
    select_blocks_reference(shares, row_slot, row_position, expected, layout)
    assert torch.equal(selected, expected)
    assert (selected[0] == POISON).all()  # all its blocks are in views
    assert (selected[1] == POISON).all()  # of no sequence of the step
    for slot in (2, 3):
        chosen = selected[slot].tolist()
        assert chosen == sorted(set(chosen))
        assert min(chosen) >= layout.num_sinks


@pytest.mark.parametrize(("sinks", "retrieved", "window"), [(1, 1, 1), (64, 4096, 256), (5, 70, 33)])
def test_a_view_has_room_for_all_rows_up_to_the_next_refresh(sinks: int, retrieved: int, window: int) -> None:
    for block_size, num_drafts in ((1, 1), (16, 3), (64, 5)):
        settings = PartialVerification(
            sink_tokens=sinks, retrieved_tokens=retrieved, window_tokens=window, refresh_tokens=9
        )
        layout = settings.layout(block_size, num_drafts)
        assert layout.num_dropped(layout.capacity - 1) == 0
        for position in range(layout.capacity - 1, layout.capacity + 3 * block_size):
            # After a refresh of all drafts and partial rounds, the last draft of the last one.
            last = position + num_drafts + 1 + layout.refresh_tokens - 1
            dropped = layout.num_dropped(position)
            assert (last - dropped * block_size) // block_size < layout.num_blocks
            assert position + 1 - window >= dropped * block_size or dropped == 0
