"""Rows of anchors and masks, and their attention as nodes of trees, against references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from references.draft import anchor_rows_reference, draft_attention_reference
from slow_cases import slow_after
from tolerances import assert_near

from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.draft.draft_rows import anchor_rows
from drift_sdk._kernels.trees.tree_attention import TreePaths, tree_attention
from drift_sdk.execution.rounds.dflash import draft_paths

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
GARBAGE = 2**31 - 1
SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def empty_rows(num_rows: int, device: str) -> Columns:
    slot, token, position, last_seen = (ints([GARBAGE] * num_rows, device) for _ in range(4))
    return slot, token, position, last_seen, torch.full((num_rows,), GARBAGE, device=device)


@pytest.mark.parametrize(("num_drafts", "num_masks"), [(1, 1), (2, 7), (7, 7), (4, 64)])
def test_rows_follow_the_newest_token(num_drafts: int, num_masks: int, device: str) -> None:
    """Slots that draft as many as the round or fewer, one that drafts nothing, and padding."""
    size = num_drafts + 1
    slot = torch.full((5, size), -1, dtype=torch.int32, device=device)
    slot[0], slot[1, :2], slot[2, :1], slot[4, :2] = 6, 0, 3, 2
    token = torch.full((5, size), GARBAGE, dtype=torch.int32, device=device)
    token[:, 0] = ints([10, 11, 12, -1, 14], device)
    position = torch.full((5, size), GARBAGE, dtype=torch.int32, device=device)
    position[:, 0] = ints([1, 70, 5, GARBAGE, 1000], device)
    given = slot.flatten(), token.flatten(), position.flatten()
    options = {"num_masks": num_masks, "mask_token": 99, "first_kv_slot": 2**33}
    found = empty_rows(5 * (1 + num_masks), device)
    anchor_rows(*given, found, **options)
    expected = anchor_rows_reference(*given, 5, **options)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[4], expected[4])
    is_live = found[0] >= 0
    assert is_live.view(5, -1)[:, 0].tolist() == [True, True, False, False, True]
    for column, other in zip(found[1:4], expected[1:4], strict=True):
        assert torch.equal(column[is_live], other[is_live])
    assert (found[1][~is_live] == -1).all() and (found[2][~is_live] <= num_masks).all()


def test_wrong_rows_are_named(device: str) -> None:
    row = ints([0] * 6, device)
    with pytest.raises(ValueError, match="7 rows with 2 masks each, of a round's 6 rows"):
        anchor_rows(row, row, row, empty_rows(7, device), num_masks=2, mask_token=1, first_kv_slot=0)

    with pytest.raises(ValueError, match="18 rows with 2 masks each, of a round's 6 rows"):
        anchor_rows(row, row, row, empty_rows(18, device), num_masks=2, mask_token=1, first_kv_slot=0)

    with pytest.raises(ValueError, match=r"row_token: \[5\] .*: expected \[6\]"):
        anchor_rows(row, row[:5], row, empty_rows(9, device), num_masks=2, mask_token=1, first_kv_slot=0)

    columns = (*empty_rows(9, device)[:4], row.repeat(2)[:9])
    with pytest.raises(ValueError, match=r"kv_slot: .* torch.int32: expected .* torch.int64"):
        anchor_rows(row, row, row, columns, num_masks=2, mask_token=1, first_kv_slot=0)


def attend(
    starts: list[int | None],
    device: str,
    *,
    num_masks: int,
    is_causal: bool,
    window: int = 0,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    num_programs: int = 528 if IS_GPU else 72,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of drafts behind so many keys (None: a slot that drafts nothing), and its reference. All
    keys that no row sees are NaN."""
    generator = torch.Generator().manual_seed(3)
    num_slots, size = len(starts), 1 + num_masks
    lengths = [start or 0 for start in starts]
    max_blocks = max(lengths) // block_size + 1
    num_blocks = num_slots * max_blocks + 1
    table = torch.randperm(num_blocks, generator=generator)[:-1].view(num_slots, max_blocks).int().to(device)
    shape = (num_blocks + -(-num_slots * size // block_size), num_kv_heads, block_size, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    query = torch.randn(num_slots * size, num_kv_heads * group, head_dim, generator=generator).to(device)
    slot, _, position, last_seen, kv_slot = rows = empty_rows(num_slots * size, device)
    anchor_rows(
        ints([[index, -1 if start is None else index] for index, start in enumerate(starts)], device).view(
            -1
        ),
        ints([[5, GARBAGE]] * num_slots, device).view(-1),
        ints([[length, GARBAGE] for length in lengths], device).view(-1),
        rows,
        num_masks=num_masks,
        mask_token=7,
        first_kv_slot=num_blocks * block_size,
    )
    seen = torch.zeros(shape[0] * block_size, dtype=torch.bool)
    for index, start in enumerate(starts):
        if start is not None:
            first = max(start - window + 1, 0) if window else 0
            at = torch.arange(first, start)
            seen[table[index].cpu().long()[at // block_size] * block_size + at % block_size] = True
            seen[kv_slot[index * size : (index + 1) * size].cpu()] = True
    unseen = (~seen).view(-1, block_size).nonzero()
    for cache in (keys, values):
        cache[unseen[:, 0], :, unseen[:, 1]] = torch.nan
    layer = LayerAttention(
        query=query,
        out=torch.full_like(query, torch.nan),
        kv=LayerKV(keys, values),
        block_table=table,
        window=window,
    )
    planned = PlannedRows(slot, position if is_causal else last_seen, size)
    reach = window + num_masks if window and not is_causal else window
    plan = AttentionPlan(
        num_slots, max(lengths) + 1 + 2 * num_masks, SMALL, query.device, window=reach, num_rows=size
    )
    scratch = AttentionScratch.allocate(
        plan, num_kv_heads=num_kv_heads, num_rows=size, group=group, head_dim=head_dim
    )
    plan_attention(planned, plan)
    for tensor in (scratch.sums, scratch.maxima, scratch.weights):
        tensor.fill_(torch.nan)
    path = draft_paths(num_masks, is_causal=is_causal).repeat(num_slots, 1).to(device)
    config = AttentionConfig(num_programs=num_programs)
    tree_attention(replace(layer, window=reach), planned, TreePaths(position, kv_slot, path), scratch, config)
    expected = draft_attention_reference(
        layer, (slot, position, kv_slot), num_masks=num_masks, is_causal=is_causal
    )
    return layer.out, expected


SHAPES: list[dict[str, int]] = [
    {"num_masks": 7},
    {"num_masks": 4, "window": 3, "num_kv_heads": 1, "group": 3, "block_size": 4, "num_programs": 12},
    {"num_masks": 15, "window": 20, "num_kv_heads": 1, "group": 1, "head_dim": 24, "block_size": 64},
    {"num_masks": 16, "num_kv_heads": 1, "group": 4, "num_programs": 12},
    {"num_masks": 1, "window": 1, "num_kv_heads": 1, "group": 1, "head_dim": 10},
    {"num_masks": 33, "window": 40, "num_kv_heads": 1, "num_programs": 12},
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", slow_after(3, SHAPES))
def test_attention_equals_the_reference(shape: dict[str, int], is_causal: bool, device: str) -> None:
    """Behind few keys and many, at borders of tiles and partitions, and beside slots that draft nothing."""
    starts = [1, 15, None, 16, 17, 31, 63, 64, 130, 200]
    found, expected = attend(starts, device, is_causal=is_causal, **shape)
    assert_near(found, expected, inner=shape.get("head_dim", 16), depth=4)
    first = 2 * (1 + shape["num_masks"])
    assert (found[first : first + 1 + shape["num_masks"]] == 0).all()


def test_rows_see_those_behind_them(device: str) -> None:
    """What the masks add: a causal draft has another result, but for its last row."""
    masked, _ = attend([20], device, num_masks=5, is_causal=False)
    causal, _ = attend([20], device, num_masks=5, is_causal=True)
    is_equal = (masked - causal).abs().amax((1, 2)) < 1e-5
    assert is_equal.tolist() == [False] * 5 + [True]
