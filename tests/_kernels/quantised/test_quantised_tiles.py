"""The tiles of products with quantised weights."""

from __future__ import annotations

import pytest
import torch
from quantised_cases import FORMATS, QuantisedFormat

from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.quantised.packing import BYTE_CODES, PANEL, PackedWeight
from drift_sdk._kernels.quantised.quantised_gemm import FEW_ITEMS, choose_tiles, most_panels

FORMAT_NAMES = {kind.name: kind for kind in FORMATS}


def empty_weight(kind: QuantisedFormat, num_columns: int, inner: int) -> PackedWeight:
    """A weight without memory."""
    panels, group_size = -(-num_columns // PANEL), kind.group_size or 128
    by_group = torch.empty((panels, inner // group_size, 4, 8, 2), dtype=kind.scales, device="meta")
    num_bytes = PANEL * inner // (1 if kind.codes in BYTE_CODES else 2)
    return PackedWeight(
        code_type=kind.codes,
        codes=torch.empty((panels, num_bytes), dtype=torch.uint8, device="meta"),
        scales=None if kind.group_size is None else by_group,
        zeros=by_group.to(torch.bfloat16) if kind.has_zeros else None,
        offsets=by_group if kind.has_offsets else None,
        row_scales=torch.empty(num_columns, device="meta") if kind.group_size is None else None,
        num_columns=num_columns,
        inner=inner,
        group_size=group_size,
        is_gated=False,
        num_slices=num_slices(num_columns, inner),
    )


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(("num_columns", "num_panels"), [(28672, 4), (34816, 5), (43008, 6)])
def test_all_ctas_of_few_rows_run_at_once(kind: QuantisedFormat, num_columns: int, num_panels: int) -> None:
    weight = empty_weight(kind, num_columns, 5120)
    tiles = choose_tiles(weight, 8)
    assert tiles.num_panels == num_panels and tiles.grid(weight, 8)[1] <= FEW_ITEMS


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("fp8 by channel", (7, 7, 7, 6)),
        ("fp8 by block", (7, 7, 6, 4)),
        ("e2m1 by 16", (7, 7, 6, 4)),
        ("int4 by 32 with offsets", (7, 6, 4, 2)),
    ],
)
def test_panels_are_limited_by_the_registers_of_sums(name: str, most: tuple[int, ...]) -> None:
    """The largest CTAs that were as fast as others, with 8, 16, 32 and 64 rows of x, on an H200."""
    weight = empty_weight(FORMAT_NAMES[name], 34816, 5120)
    assert tuple(most_panels(weight, rows) for rows in (8, 16, 32, 64)) == most


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_few_rows_have_three_stages(kind: QuantisedFormat) -> None:
    for num_columns in (64, 4096, 5120, 34816, 43008, 55296, 248320):
        weight = empty_weight(kind, num_columns, 5120)
        assert min(choose_tiles(weight, rows).num_stages for rows in (1, 8, 16, 32, 64)) >= 3


def test_more_ctas_than_multiprocessors_have_large_ones() -> None:
    """With 3,880 panels, the cost of each CTA's first steps decides; with 544 and 64 rows, which allow four
    panels, three of 182 CTAs are faster than four of 136, of which four would run alone."""
    kind = FORMAT_NAMES["fp8 by block"]
    assert choose_tiles(empty_weight(kind, 248320, 5120), 8).num_panels >= 4
    assert choose_tiles(empty_weight(kind, 34816, 5120), 64).num_panels == 3
