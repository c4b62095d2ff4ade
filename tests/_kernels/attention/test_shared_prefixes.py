"""Prefixes that sequences share: companions, the plan of their keys, and attention with the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from references.attention import plan_attention_reference, shared_prefixes_reference
from slow_cases import slow_after

from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch, paged_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import (
    AttentionPlan,
    BlockTable,
    PlannedRows,
    SharedPrefixes,
    find_shared_prefixes,
    most_companions,
    plan_attention,
)
from drift_sdk._kernels.attention.softmax import Partitions

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("steady_dots")]

SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=1, tile=16)
GROUP = 4


def blocks_of(lengths: list[int], prefixes: list[tuple[int, int]], size: int) -> torch.Tensor:
    """A block table [slots, max_blocks] in which sequences have blocks of their own behind their beginnings.

    prefixes: of each sequence, the number of the prefix that it begins with, and how many of its blocks.
    """
    most = max(lengths) // size + 2
    table = torch.arange(len(lengths) * most, dtype=torch.int32).view(-1, most) + 1000
    for slot, (prefix, num_blocks) in enumerate(prefixes):
        table[slot, :num_blocks] = torch.arange(num_blocks, dtype=torch.int32) + 100 * prefix
    return table


def rows_of(lengths: list[int], rows_each: int, device: str) -> PlannedRows:
    """The newest rows of sequences, each in the slot of its index; sequences of length 0 are padding."""
    slot, position = [], []
    for index, length in enumerate(lengths):
        for row in range(rows_each):
            is_live = row < length
            slot.append(index if is_live else -1)
            position.append(max(0, length - rows_each) + row if is_live else 0)
    numbers = torch.tensor([slot, position], dtype=torch.int32, device=device)
    return PlannedRows(numbers[0], numbers[1], rows_each)


def found_prefixes(
    rows: PlannedRows, blocks: BlockTable, group: int = GROUP, partitions: Partitions = SMALL
) -> list[tuple[int, tuple[int, ...]]]:
    shared = SharedPrefixes.allocate(rows.num_sequences, rows.slot.device)
    find_shared_prefixes(rows, blocks, group, partitions, shared)
    companions = [tuple(row) for row in shared.companions.tolist()]
    return list(zip(shared.num_keys.tolist(), companions, strict=True))


@pytest.mark.parametrize(
    ("lengths", "prefixes", "expected"),
    [
        # Blocks of 16 keys; partitions end at 32, 64 and 128.
        ([100, 100], [(0, 4), (0, 4)], [(64, (0, 1, -1, -1))] * 2),
        ([100, 100], [(0, 5), (0, 5)], [(64, (0, 1, -1, -1))] * 2),
        ([100, 100], [(0, 1), (0, 1)], [(0, (0, -1, -1, -1)), (0, (1, -1, -1, -1))]),
        ([40, 300], [(0, 4), (0, 4)], [(32, (0, 1, -1, -1))] * 2),
        ([31, 300], [(0, 4), (0, 4)], [(0, (0, -1, -1, -1)), (0, (1, -1, -1, -1))]),
        ([300, 0, 300], [(0, 12), (0, 12), (0, 12)], [(192, (0, 2, -1, -1)), (0, (1, -1, -1, -1))]),
        ([70] * 5, [(0, 4)] * 5, [(64, (0, 1, 2, 3))] * 4 + [(0, (4, -1, -1, -1))]),
        ([70, 70, 70], [(0, 4), (1, 4), (0, 3)], [(32, (0, 2, -1, -1)), (0, (1, -1, -1, -1))]),
    ],
)
def test_companions_share_what_all_of_them_have(
    lengths: list[int],
    prefixes: list[tuple[int, int]],
    expected: list[tuple[int, tuple[int, ...]]],
    device: str,
) -> None:
    blocks = BlockTable(blocks_of(lengths, prefixes, 16).to(device), 16)
    found = found_prefixes(rows_of(lengths, 1, device), blocks)
    assert found[: len(expected)] == expected


@pytest.mark.parametrize("seed", range(8))
def test_prefixes_equal_the_reference(seed: int, device: str) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 8, 16, 64, 128])
    rows_each, group = rng.choice([(1, 4), (1, 7), (2, 2), (1, 1), (1, 16)])
    partitions = rng.choice([SMALL, Partitions(num_doublings=0), Partitions()])
    number = rng.choice([2, 9, 33])
    most = 40 if size == 1 else 60
    lengths = [rng.randrange(most * size) for _ in range(number)]
    prefixes = [(rng.randrange(3), rng.randrange(min(length // size, most) + 1)) for length in lengths]
    blocks = BlockTable(blocks_of(lengths, prefixes, size).to(device), size)
    rows = rows_of(lengths, rows_each, device)
    assert found_prefixes(rows, blocks, group, partitions) == shared_prefixes_reference(
        rows, blocks, group, partitions
    )
    plan = AttentionPlan(number + 1, most * size + 1, partitions, torch.device(device))
    for tensor in (plan.tiles, plan.shared.num_keys, plan.shared.companions):
        tensor.fill_(-7)
    plan_attention(rows, plan, blocks, group)
    expected = plan_attention_reference(rows, partitions, blocks=blocks, group=group)
    assert plan.num_tiles.item() == len(expected)
    assert torch.equal(plan.tiles[: len(expected)], expected)


def test_blocks_that_are_equal_behind_others_are_not_shared(device: str) -> None:
    table = blocks_of([100, 100], [(0, 4), (0, 4)], 16)
    table[1, 0] = 7
    found = found_prefixes(rows_of([100, 100], 1, device), BlockTable(table.to(device), 16))
    assert [num_keys for num_keys, _ in found] == [0, 0]


@pytest.mark.parametrize(
    ("num_sequences", "rows_each", "group", "window", "expected"),
    [
        (64, 1, 4, 0, 4),
        (64, 1, 1, 0, 4),
        (64, 1, 7, 0, 2),
        (64, 1, 8, 0, 2),
        (64, 2, 4, 0, 2),
        (64, 4, 4, 0, 1),
        (64, 5, 4, 0, 1),
        (1, 1, 4, 0, 1),
        (64, 1, 4, 128, 1),
    ],
)
def test_companions_fit_into_the_tile_of_one_sequence(
    num_sequences: int, rows_each: int, group: int, window: int, expected: int
) -> None:
    rows = rows_of([9] * num_sequences, rows_each, "cpu")
    assert most_companions(rows, group, window) == expected


class Case:
    """Sequences with random queries, keys and values, and beginnings in common. Other places hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        prefixes: list[tuple[int, int]],
        *,
        device: str,
        rows_each: int = 1,
        num_kv_heads: int = 2,
        group: int = GROUP,
        head_dim: int = 16,
        size: int = 16,
        dtype: torch.dtype = torch.float32,
        is_e4m3: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = rows_of(lengths, rows_each, device)
        table = blocks_of(lengths, prefixes, size)
        names, table = table.unique(return_inverse=True)
        shape = (len(names), num_kv_heads, size, head_dim)
        caches = torch.randn(2, *shape, generator=generator)
        for slot, length in enumerate(lengths):
            for column in range(table.shape[1]):
                is_own = column >= prefixes[slot][1]
                if is_own:
                    caches[:, table[slot, column], :, max(0, length - column * size) :] = torch.nan
        keys, values = caches.to(device, torch.float8_e4m3fn if is_e4m3 else dtype)
        scale = torch.linspace(0.5, 1.5, num_kv_heads, device=device) if is_e4m3 else None
        self.kv = LayerKV(keys, values, scale, scale)
        self.blocks = BlockTable(table.int().to(device), size)
        num_heads = num_kv_heads * group
        query = torch.randn(len(lengths) * rows_each, num_heads, head_dim, generator=generator)
        self.query, self.group, self.options = query.to(device, dtype), group, options
        self.plan = AttentionPlan(len(lengths), max(lengths) + 1, SMALL, torch.device(device))

    def run(self, rows: PlannedRows, query: torch.Tensor, *, is_shared: bool) -> torch.Tensor:
        scratch = AttentionScratch.allocate(
            self.plan,
            num_kv_heads=self.kv.num_heads,
            num_rows=rows.rows_per_sequence,
            group=self.group,
            head_dim=query.shape[2],
        )
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)
        plan_attention(rows, self.plan, self.blocks if is_shared else None, self.group)
        out = torch.full_like(query, torch.nan)
        layer = LayerAttention(
            query=query, out=out, kv=self.kv, block_table=self.blocks.table, **self.options
        )
        paged_attention(layer, rows, scratch, AttentionConfig(num_programs=6))
        return out


@pytest.mark.parametrize(
    "options",
    slow_after(
        4,
        [
            {},
            {"group": 7, "head_dim": 20},
            {"group": 2, "rows_each": 2},
            {"dtype": torch.float16, "head_dim": 32, "is_e4m3": True},
            {"size": 64},
            {"group": 1},
            {"first_key": 1, "scale": 0.7},
            {"dtype": torch.float16, "head_dim": 64},
        ],
    ),
)
def test_attention_has_the_bits_that_a_sequence_alone_gets(options: dict[str, Any], device: str) -> None:
    lengths = [130, 0, 200, 90, 161, 77, 130, 260, 20]
    blocks = 256 // options.get("size", 16)
    prefixes = [(0, min(length, 128) * blocks // 256) for length in lengths]
    prefixes[3], prefixes[7] = (1, prefixes[3][1]), (1, prefixes[7][1])
    case = Case(lengths, prefixes, device=device, **options)
    shared = case.run(case.rows, case.query, is_shared=True)
    num_tiles = case.plan.num_tiles.item()
    assert torch.equal(shared, case.run(case.rows, case.query, is_shared=False))
    assert num_tiles < case.plan.num_tiles.item()
    each = case.rows.rows_per_sequence
    for index in (4, 7):
        own = slice(index * each, (index + 1) * each)
        alone = case.run(case.rows.of_rows(own), case.query[own].contiguous(), is_shared=True)
        assert torch.equal(shared[own], alone)
    assert shared[each : 2 * each].count_nonzero() == 0


def test_sinks_and_windows_go_with_shared_prefixes(device: str) -> None:
    sinks = torch.linspace(-1, 1, 2 * GROUP, device=device)
    lengths, prefixes = [130, 200, 90], [(0, 5)] * 3
    case = Case(lengths, prefixes, device=device, sinks=sinks)
    expected = case.run(case.rows, case.query, is_shared=False)
    assert torch.equal(case.run(case.rows, case.query, is_shared=True), expected)
    case = Case(lengths, prefixes, device=device, window=50)
    case.plan = AttentionPlan(3, 201, SMALL, torch.device(device), window=50)
    expected = case.run(case.rows, case.query, is_shared=False)
    assert torch.equal(case.run(case.rows, case.query, is_shared=True), expected)


def test_errors_name_the_argument(device: str) -> None:
    rows, table = rows_of([40, 40], 1, device), blocks_of([40, 40], [(0, 2)] * 2, 16).to(device)
    shared = SharedPrefixes.allocate(1, torch.device(device))
    with pytest.raises(ValueError, match="num_sequences=2: expected 1 to 1"):
        find_shared_prefixes(rows, BlockTable(table, 16), GROUP, SMALL, shared)
    with pytest.raises(ValueError, match="block_table: .* torch.int64: expected .* torch.int32"):
        find_shared_prefixes(rows, BlockTable(table.long(), 16), GROUP, SMALL, shared)
