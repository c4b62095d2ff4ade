from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from references.attention import plan_attention_reference

from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.softmax import Partitions

pytestmark = pytest.mark.kernel

SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)


def rows_of(lengths: list[int], num_rows: int, device: str) -> PlannedRows:
    """The last `num_rows` rows of sequences; a shorter sequence has padding rows at the end."""
    first = torch.tensor([max(0, length - num_rows) for length in lengths])
    last = torch.tensor(lengths)[:, None] - 1
    position = first[:, None] + torch.arange(num_rows)
    slot = torch.arange(len(lengths))[:, None].where(position <= last, -1)
    flat = (tensor.flatten().int().to(device) for tensor in (slot, position.minimum(last)))
    return PlannedRows(*flat, num_rows)


@pytest.mark.parametrize("window", [0, 1, 20, 500])
@pytest.mark.parametrize(("lengths", "num_rows"), [([1], 1), ([5, 40, 9, 260, 16], 1), ([2, 33, 129], 4)])
def test_plan_equals_the_reference(lengths: list[int], num_rows: int, window: int, device: str) -> None:
    rows = rows_of(lengths, num_rows, device)
    if len(lengths) > 1:
        rows.slot[num_rows : 2 * num_rows] = -1
    num_sequences = len(lengths) + 2
    plan = AttentionPlan(
        num_sequences, max(lengths) + 300, SMALL, torch.device(device), window=window, num_rows=num_rows
    )
    plan_attention(rows, plan)
    expected = plan_attention_reference(rows, SMALL, window)
    assert plan.num_tiles.item() == len(expected)
    assert torch.equal(plan.tiles[: len(expected)], expected)
    if window:
        # Tiles are read as far as the window reaches, whatever the length.
        most_tiles = (window + num_rows - 1 + 2 * (SMALL.tile - 1)) // SMALL.tile
        assert plan.tiles.shape[0] <= num_sequences * most_tiles
        assert expected[:, 0].bincount().max() <= most_tiles


def test_plan_errors_name_the_argument(device: str) -> None:
    rows = rows_of([5, 40], 1, device)
    plan = AttentionPlan(1, 100, SMALL, torch.device(device))
    with pytest.raises(ValueError, match="row_slot: 2 sequences: expected at most 1"):
        plan_attention(rows, plan)
    with pytest.raises(ValueError, match=r"row_position: \[1\] torch.int32: expected \[2\] torch.int32"):
        plan_attention(replace(rows, position=rows.position[:1]), plan)
    with pytest.raises(ValueError, match="window=-1: expected 0 or more"):
        AttentionPlan(1, 100, SMALL, torch.device(device), window=-1)
    with pytest.raises(ValueError, match="rows_per_sequence=2: expected 1 to 1"):
        plan = AttentionPlan(1, 100, SMALL, torch.device(device), window=8)
        plan_attention(replace(rows, rows_per_sequence=2), plan)
