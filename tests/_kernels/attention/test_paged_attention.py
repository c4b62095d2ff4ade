from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from order_probe import expected_sum, probe_row
from references.attention import paged_attention_reference
from slow_cases import slow_after, slow_rows_after
from tolerances import assert_near

from drift_sdk._kernels.attention import decode
from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch, paged_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import (
    AttentionPlan,
    PlannedRows,
    plan_attention,
)
from drift_sdk._kernels.attention.softmax import Partitions

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if IS_GPU else (torch.float32,)
SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)
EVEN = Partitions(narrow=32, num_doublings=0, tile=16)


class Case:
    """Sequences of given lengths in a cache of shuffled blocks. Positions after a sequence's end, and before
    the window of its first row, hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        num_rows: int,
        *,
        device: str,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        num_kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 16,
        seed: int = 0,
        window: int = 0,
        has_sinks: bool = False,
        scale: float | None = None,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        num_sequences, most = len(lengths), max(lengths)
        max_blocks = -(-most // block_size) + 1
        num_blocks = num_sequences * max_blocks
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.keys, self.values = torch.full((2, *shape), torch.nan, dtype=dtype, device=device)
        permutation = torch.randperm(num_blocks, generator=generator, device=device)
        self.block_table = permutation.view(num_sequences, max_blocks).int()
        self.row_slot = torch.arange(num_sequences, device=device).repeat_interleave(num_rows).int()
        self.row_position = torch.empty(num_sequences * num_rows, dtype=torch.int32, device=device)
        for index, length in enumerate(lengths):
            first = max(0, length - num_rows)
            rows = torch.arange(num_rows, device=device) + first
            self.row_position[index * num_rows : (index + 1) * num_rows] = rows.clamp(max=length - 1)
            self.row_slot[index * num_rows : (index + 1) * num_rows][rows >= length] = -1
            for block in range(-(-length // block_size)):
                size = min(block_size, length - block * block_size)
                place = self.block_table[index, block].item()
                self.keys[place, :, :size] = randn(num_kv_heads, size, head_dim)
                self.values[place, :, :size] = randn(num_kv_heads, size, head_dim)
            for position in range(first - window + 1 if window else 0):
                place = self.block_table[index, position // block_size].item()
                self.keys[place, :, position % block_size] = torch.nan
                self.values[place, :, position % block_size] = torch.nan
        self.query = randn(num_sequences * num_rows, num_kv_heads * group, head_dim)
        self.num_rows = num_rows
        self.max_num_keys = most + 300
        self.window = window
        sinks = randn(num_kv_heads * group) if has_sinks else None
        self.options: dict[str, Any] = {"sinks": sinks, "scale": scale}

    def run(
        self,
        partitions: Partitions,
        rows: slice | None = None,
        num_rows: int | None = None,
        config: AttentionConfig | None = None,
        first_key: int = 0,
    ) -> torch.Tensor:
        """The output of the kernels for all rows, or for some of them in sequences of `num_rows`."""
        rows = slice(None) if rows is None else rows
        num_rows = num_rows or self.num_rows
        planned = PlannedRows(self.row_slot[rows], self.row_position[rows], num_rows)
        layer = self.layer(first_key).of_rows(rows)
        plan = AttentionPlan(
            planned.num_sequences,
            self.max_num_keys,
            partitions,
            layer.query.device,
            window=self.window,
            num_rows=num_rows,
        )
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=layer.kv.num_heads,
            num_rows=num_rows,
            group=layer.group,
            head_dim=layer.head_dim,
        )
        plan_attention(planned, plan)
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)  # the kernels between the plan and attention
        config = config or AttentionConfig(num_programs=264 if IS_GPU else 7 * layer.kv.num_heads)
        paged_attention(layer, planned, scratch, config)
        return layer.out

    def layer(self, first_key: int = 0) -> LayerAttention:
        return LayerAttention(
            query=self.query,
            out=torch.full_like(self.query, torch.nan),
            kv=LayerKV(self.keys, self.values),
            block_table=self.block_table,
            window=self.window,
            first_key=first_key,
            **self.options,
        )

    @property
    def rows(self) -> PlannedRows:
        return PlannedRows(self.row_slot, self.row_position, self.num_rows)

    def reference(self, first_key: int = 0) -> torch.Tensor:
        return paged_attention_reference(self.layer(first_key), self.rows)


def assert_attended(case: Case, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Probabilities and output are rounded to the storage type: half an eps each."""
    magnitude = case.values.nan_to_num().abs().max().item()
    num_roundings = 0 if found.dtype == torch.float32 else 1
    assert_near(found, expected, inner=case.max_num_keys, magnitude=magnitude, num_roundings=num_roundings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", slow_after(2, [1, 3, 6]))
@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 1},
        {"block_size": 64, "num_kv_heads": 3, "group": 3, "head_dim": 24},
        {"num_kv_heads": 1, "group": 8, "head_dim": 64},
        {"block_size": 4, "group": 1, "head_dim": 80},
        {"block_size": 64, "num_kv_heads": 1, "group": 8, "head_dim": 264},
        {"block_size": 8, "num_kv_heads": 1, "group": 11, "head_dim": 512},
    ],
    ids=str,
)
def test_attention_is_near_the_reference(
    shape: dict[str, int], num_rows: int, dtype: torch.dtype, device: str
) -> None:
    case = Case([1, 17, 33, 97, 260], num_rows, device=device, dtype=dtype, **shape)
    assert_attended(case, case.run(SMALL), case.reference())


@pytest.mark.parametrize("first_key", [1, 5])
@pytest.mark.parametrize("block_size", [4, 64])
def test_positions_before_first_key_are_not_read(block_size: int, first_key: int, device: str) -> None:
    case = Case([6, 7, 33, 50], 1, device=device, block_size=block_size)
    for position in range(first_key):
        block = case.block_table[:, position // block_size].long()
        case.keys[block, :, position % block_size] = torch.nan
        case.values[block, :, position % block_size] = torch.nan
    out, expected = case.run(SMALL, first_key=first_key), case.reference(first_key)
    assert_attended(case, out, expected)
    with pytest.raises(ValueError, match="first_key=16: expected 0 to 15"):
        case.run(SMALL, first_key=16)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("window", [1, 7, 16, 40, 100])
def test_windows_and_sinks_are_near_the_reference(window: int, num_rows: int, device: str) -> None:
    """Keys that no row sees are NaN, and there is room only for the partitions of a window."""
    case = Case(
        [97, 1, 17, 150],  # the first tile of all lies inside a partition
        num_rows,
        device=device,
        block_size=4 if num_rows == 1 else 64,
        num_kv_heads=1,
        window=window,
        has_sinks=window % 2 == 0,
    )
    assert_attended(case, case.run(SMALL if window == 40 else EVEN), case.reference())


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_sink_takes_its_share_of_the_softmax(num_rows: int, device: str) -> None:
    case = Case([2, 1], num_rows, device=device, num_kv_heads=1)
    case.query.zero_()
    case.options["sinks"] = torch.tensor([0.0, -100.0], device=device)
    values = case.values[case.block_table[:, 0].long(), 0]
    out = case.run(SMALL).view(2, num_rows, 2, 16)
    row = min(num_rows, 2) - 1  # the row at position 1 of the first sequence
    both = values[0, 0] + values[0, 1]
    torch.testing.assert_close(out[0, row], torch.stack((both / 3, both / 2)))
    torch.testing.assert_close(out[1, 0], torch.stack((values[1, 0] / 2, values[1, 0])))
    assert not out[1, 1:].any()  # padding rows


def test_scale_replaces_that_of_the_head_dim(device: str) -> None:
    case = Case([33, 5], 2, device=device, scale=0.7)
    found = case.run(SMALL)
    assert_attended(case, found, case.reference())
    case.options["scale"] = None
    assert not torch.allclose(case.run(SMALL), found, atol=1e-2)


def test_padding_rows_get_zeros_and_change_no_other_row(device: str) -> None:
    case = Case([5, 40, 9], 1, device=device)
    case.row_slot[1] = -1
    out = case.run(SMALL)
    assert out[1].eq(0).all()
    assert_attended(case, out, case.reference())


@pytest.mark.parametrize("window", [0, 128, 3000] if IS_GPU else [0])
def test_bits_of_a_row_do_not_depend_on_other_rows(window: int, device: str) -> None:
    """Bit for bit on a GPU. The interpreter multiplies by BLAS, whose order of summation may vary."""
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    lengths = [2051, 4099, 9000, 7] if IS_GPU else [66, 130, 7]
    config = Partitions.of_layer(64, window) if IS_GPU else SMALL
    case = Case(lengths, 6, device=device, dtype=dtype, num_kv_heads=2, group=4, head_dim=64, window=window)
    together = case.run(config)
    if IS_GPU:
        assert_attended(case, together, case.reference())
    for row in range(len(case.query)):
        alone = case.run(config, slice(row, row + 1), 1)
        if IS_GPU:
            assert torch.equal(alone[0], together[row])
        else:
            assert_attended(case, alone[0], together[row])


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, whose order of summation may vary. Tensor cores' does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype=dtype))


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("window", "partitions"), [(9, SMALL), (40, EVEN)], ids=["9", "40"])
def test_bits_in_a_window_do_not_depend_on_other_rows(
    window: int, partitions: Partitions, device: str
) -> None:
    """A row verified with others, in one prefill tile of eight with others, and alone."""
    case = Case([130, 6], 8, device=device, num_kv_heads=1, window=window, has_sinks=True)
    together = case.run(partitions)
    for first in (0, 7, 11):
        alone = case.run(partitions, slice(first, first + 1), 1)
        assert torch.equal(alone[0], together[first])


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    ("window", "partitions"),
    slow_rows_after(2, [(0, SMALL), (9, SMALL), (40, EVEN)]),
    ids=["0", "9", "40"],
)
def test_bits_of_wide_heads_do_not_depend_on_other_rows(
    window: int, partitions: Partitions, device: str
) -> None:
    """Seven rows for eleven heads are three tiles of query rows, the last one not full."""
    shape = {"num_kv_heads": 1, "group": 11, "head_dim": 264}
    case = Case([130, 4, 1], 7, device=device, window=window, has_sinks=True, **shape)
    together = case.run(partitions)
    assert_attended(case, together, case.reference())
    for first in (0, 2, 3, 6, 10):
        alone = case.run(partitions, slice(first, first + 1), 1)
        assert torch.equal(alone[0], together[first])


@pytest.mark.usefixtures("exact_products")
def test_bits_in_a_window_of_all_keys_are_those_without(device: str) -> None:
    case = Case([70, 130], 2, device=device, num_kv_heads=1)
    expected = case.run(SMALL)
    case.window = 130
    assert torch.equal(case.run(SMALL), expected)


@pytest.mark.parametrize(("num_programs", "window"), [(2, 0), (4, 0), (4, 40), (10, 0), (64, 0), (64, 40)])
def test_bits_do_not_depend_on_the_number_of_programs(num_programs: int, window: int, device: str) -> None:
    case = Case([1, 50, 300, 33], 2, device=device, window=window)
    expected = case.run(SMALL, config=AttentionConfig(num_programs=6))
    assert torch.equal(case.run(SMALL, config=AttentionConfig(num_programs=num_programs)), expected)


@pytest.mark.parametrize(
    ("begin", "border", "end"), [(0, 32, 64), (32, 64, 128), (64, 128, 256), (128, 256, 384)]
)
def test_partitions_are_summed_by_themselves(begin: int, border: int, end: int, device: str) -> None:
    """All keys have the same score, so the output is the mean of the values: of those of two partitions, and
    zeros before them."""
    case = Case([end], 1, device=device, block_size=16)
    case.query.zero_()
    case.values.zero_()
    blocks = case.block_table[0, torch.arange(end, device=device) // 16].long()
    row = torch.cat([torch.zeros(begin), probe_row(end - begin, [border - begin])]).to(device)
    case.values[blocks, :, torch.arange(end, device=device) % 16] = row[:, None, None].expand(-1, 2, 16)
    total = case.run(SMALL) * end
    assert (total - 1.0).abs().max() < 1e-3


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_programs", [2, 4, 14])
def test_partitions_are_added_in_ascending_order(num_programs: int, num_rows: int, device: str) -> None:
    """For few and many partitions, whichever programs sum them."""
    borders = [32, 64, *range(128, 900, 128)]
    for num_partitions in (4, 9):
        end = borders[num_partitions - 1]
        case = Case([end], num_rows, device=device, block_size=64, num_kv_heads=1, group=1)
        case.query.zero_()
        row = probe_row(end, borders[: num_partitions - 1]).to(device)
        keys = torch.arange(end, device=device)
        case.values[case.block_table[0, keys // 64].long(), :, keys % 64] = row[:, None, None]
        found = case.run(SMALL, config=AttentionConfig(num_programs=num_programs))[-1] * end
        assert (found - expected_sum(num_partitions)).abs().max() < 1e-3


@pytest.mark.parametrize(("numbers", "few", "window"), [(64, 2, 0), (1024, 8, 0), (64, 2, 100)])
def test_bits_do_not_depend_on_what_is_loaded_together(
    numbers: int, few: int, window: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on how many dimensions a program has."""
    case = Case([1, 50, 540], 2, device=device, num_kv_heads=1, group=2, head_dim=64, window=window)
    expected = case.run(SMALL, config=AttentionConfig(num_programs=2))
    monkeypatch.setattr(decode, "LOADED_NUMBERS", numbers)
    monkeypatch.setattr(decode, "FEW_PARTITIONS", few)
    for programs in (0, 2**20):
        monkeypatch.setattr(decode, "MIN_PROGRAMS", programs)
        assert torch.equal(case.run(SMALL, config=AttentionConfig(num_programs=4)), expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x.half(), r"out: .*torch.float32: expected .*torch.float16"),
        ("query", lambda x: x.transpose(0, 1), "query: strides .*: expected a contiguous tensor"),
        ("values", lambda x: x[:, :1], r"values: \[.*\] torch.float32: expected \[.*\]"),
        ("block_table", lambda x: x.T, "block_table: strides .*: expected 1 along the last dimension"),
        ("row_slot", lambda x: x[1:], r"row_slot: \[1\] torch.int32: expected \[2\] torch.int32"),
        ("row_position", lambda x: x.long(), "row_position: .* torch.int64: expected .* torch.int32"),
        ("sinks", lambda x: x[1:], r"sinks: \[3\] torch.float32: expected \[4\] torch.float32"),
        ("window", lambda x: 5, "window=5: expected 0, that of the plan"),
        ("rows_per_sequence", lambda x: 3, "query: 2 rows: expected 3 for each of at most 2 sequences"),
        ("rows_per_sequence", lambda x: 2, "scratch: room for 2 query rows: expected 4 or more"),
    ],
)
def test_errors_name_the_argument(name: str, change: Callable[[Any], Any], message: str, device: str) -> None:
    case = Case([5, 40], 1, device=device)
    plan = AttentionPlan(2, case.max_num_keys, SMALL, torch.device(device))
    scratch = AttentionScratch.allocate(plan, num_kv_heads=2, num_rows=1, group=2, head_dim=16)
    case.options["sinks"] = torch.zeros(4, device=device)
    layer, rows = case.layer(), case.rows
    if name in ("keys", "values"):
        kv = replace(layer.kv, **{name: change(getattr(layer.kv, name))})
        layer = replace(layer, kv=kv)
    elif name in layer.__struct_fields__:
        layer = replace(layer, **{name: change(getattr(layer, name))})
    else:
        field = name.removeprefix("row_")
        rows = replace(rows, **{field: change(getattr(rows, field))})
    with pytest.raises(ValueError, match=message):
        paged_attention(layer, rows, scratch, AttentionConfig())


def test_scratch_for_more_rows_serves_fewer(device: str) -> None:
    case = Case([5, 40], 1, device=device)
    plan = AttentionPlan(2, case.max_num_keys, SMALL, torch.device(device))
    scratch = AttentionScratch.allocate(plan, num_kv_heads=2, num_rows=3, group=2, head_dim=16)
    plan_attention(case.rows, plan)
    layer = case.layer()
    paged_attention(layer, case.rows, scratch, AttentionConfig(num_programs=4))
    assert_attended(case, layer.out, case.reference())


@pytest.mark.parametrize("num_warps", [0, 3, 16])
def test_other_numbers_of_warps_are_rejected(num_warps: int) -> None:
    with pytest.raises(ValueError, match=f"num_warps={num_warps}: expected 1, 2, 4 or 8"):
        AttentionConfig(num_warps=num_warps)


STAGES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (2, 5), (4, 2))
LARGE_STAGES = ((2, 1), (4, 1), (2, 2), (4, 2))
WIDE_STAGES = ((4, 1), (8, 1), (8, 2))
"""Warps and stages, also of heads of 256 and of 512 dimensions."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "group", "head_dim"),
    [
        *((1, 4, 128), (4, 4, 128), (8, 4, 128), (8, 8, 128), (16, 8, 128)),
        *((1, 6, 256), (4, 6, 256), (6, 6, 256), (1, 8, 512), (2, 16, 512), (8, 16, 512)),
    ],
)
def test_bits_do_not_depend_on_warps_and_stages(
    num_rows: int, group: int, head_dim: int, device: str
) -> None:
    """Tiles of 16 to 128 rows. From 64 rows on, four warps use another instruction."""
    shape = {"block_size": 64, "num_kv_heads": 2, "group": group, "head_dim": head_dim}
    case = Case([700, 1, 4700, 64], num_rows, device=device, dtype=torch.bfloat16, **shape)
    found = [
        case.run(
            Partitions.of_layer(head_dim, 0),
            config=AttentionConfig(num_programs=64, num_stages=stages, num_warps=warps),
        )
        for warps, stages in {128: STAGES, 256: LARGE_STAGES, 512: WIDE_STAGES}[head_dim]
    ]
    assert all(torch.equal(out, found[0]) for out in found)
