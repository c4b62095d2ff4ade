"""Tuned tables do not change bits: slices follow from shapes, whatever a table says."""

from __future__ import annotations

import json
from importlib import resources

import msgspec
import pytest
import torch
from order_probe import expected_sum, probe_row

from drift_sdk._kernels.gemm.gemm import GemmConfig, multiply
from drift_sdk._kernels.gemm.slices import num_slices, slice_size
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, table_for
from drift_sdk.cli.tune import ROW_COUNTS, Weight, candidates, tiles_of

TUNED = table_for("nvidia-h200")
UNTUNED = TunedTable()
SHAPES = [
    (6144, 4096, False),
    (4096, 14_336, False),
    (28_672, 4096, True),
    (128_256, 4096, False),
    (576, 576, False),
    (576, 1536, False),
    (3584, 18_944, False),
    (1000, 333, False),
    (48, 32, True),
]
"""Columns and inner dimension of weights, and whether they are gated. Some have entries in the table."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tuned_and_untuned_weights_have_the_same_slices(shape: tuple[int, int, bool]) -> None:
    num_columns, inner, is_gated = shape
    expected = num_slices(num_columns, inner, is_whole=is_gated)
    for table in (TUNED, UNTUNED):
        gemm = table.gemm(num_columns, inner, is_gated=is_gated)
        assert {gemm.config(rows).num_slices for rows in (1, 7, 64, 65, 384, 8192)} == {expected}
        assert table.gemm(num_columns, inner, is_whole=True).config(1).num_partials == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tuning_tries_no_other_slices(shape: tuple[int, int, bool]) -> None:
    """And what it measured is what the table gives back."""
    num_columns, inner, is_gated = shape
    for rows in ROW_COUNTS:
        tried = list(candidates(Weight(*shape), rows))
        assert len(set(tried)) == len(tried) > 4
        for config in tried:
            key = f"{num_columns}x{inner}{' gated' if is_gated else ''}"
            table = TunedTable(gemms={key: TunedTiles(((rows, tiles_of(config)),))})
            assert table.gemm(num_columns, inner, is_gated=is_gated).config(rows) == config


def test_tables_that_choose_slices_are_rejected() -> None:
    """Such a table was written when slices were still tuned."""
    file = resources.files("drift_sdk._kernels.gemm") / "tuned" / "nvidia-h200.json"
    table = json.loads(file.read_bytes())
    assert msgspec.convert(table, TunedTable) == TUNED
    table["gemms"]["6144x4096"]["by_rows"][0][1]["num_slices"] = 2
    with pytest.raises(msgspec.ValidationError, match="num_slices"):
        msgspec.convert(table, TunedTable)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(576, 1536), (576, 576), (4096, 512)], ids=str)
def test_products_add_the_slices_of_the_rule_in_order(shape: tuple[int, int], device: str) -> None:
    """Tuned and untuned, for every number of rows of the table."""
    num_columns, inner = shape
    number = num_slices(num_columns, inner)
    size = slice_size(inner, number)
    x = probe_row(inner, range(size, inner, size)).to(device)[None]
    weight = torch.ones(64, inner, device=device)
    rows = (1, 32, 384)
    for config in {table.gemm(*shape).config(num) for table in (TUNED, UNTUNED) for num in rows}:
        out = torch.full((config.num_partials, 1, 64), torch.nan, device=device)
        multiply(x, weight, out, config)
        total = out[0]
        for part in out[1:]:
            total = total + part
        assert torch.equal(total, torch.full_like(total, expected_sum(number))), config


@pytest.mark.kernel
@pytest.mark.parametrize("num_slices", [1, 2, 8])
def test_other_slices_give_another_sum(num_slices: int, device: str) -> None:
    """So the test above detects them."""
    x = probe_row(1536, (384, 768, 1152)).to(device)[None]
    out = torch.full((1, 1, 64), torch.nan, device=device)
    config = GemmConfig(False, 64, 16, 64, 3, 4, num_slices=num_slices)
    multiply(x, torch.ones(64, 1536, device=device), out, config)
    assert (out != expected_sum(4)).all()
