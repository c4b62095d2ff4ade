"""Products of experts with quantised weights: near the references, the same bits for any rows and tiles."""

from __future__ import annotations

import pytest
import torch
from expert_matrices import assert_rows_near, drawn, poisoned, routed
from msgspec.structs import replace
from quantised_cases import FORMATS, QuantisedFormat, draw
from references.experts import expert_multiply_reference, gated_expert_multiply_reference

from drift_sdk._kernels.experts.packed_products import (
    PackedExperts,
    PairTiles,
    choose_pair_tiles,
    packed_expert_multiply,
    packed_gated_expert_multiply,
    stack_experts,
)
from drift_sdk._kernels.experts.routing import ExpertRows, list_rows
from drift_sdk._kernels.quantised.packing import PackedWeight, has_programs
from drift_sdk._kernels.quantised.quantised_gemm import quantised_multiply

BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16) if torch.cuda.is_available() else (torch.float32,)
"""Types that can be tested. The interpreter multiplies bfloat16 as if its bits were integers."""
# Rows, experts, experts of a row, columns of the output, inner dimension: whole steps and half ones.
SHAPES = ((7, 5, 2, 64, 448), (40, 4, 2, 64, 64))
LARGE_SHAPES = ((1, 128, 8, 768, 2048), (40, 32, 8, 192, 128), (64, 16, 4, 192, 64), (300, 3, 1, 128, 320))
TILES = (
    PairTiles(1, 8, 2, 2),
    PairTiles(1, 16, 5, 2),
    PairTiles(2, 8, 4, 1),
    PairTiles(2, 32, 3, 1),
    PairTiles(1, 64, 4, 1),
)


def drawn_experts(
    kind: QuantisedFormat, num_experts: int, num_columns: int, inner: int, device: str, *, is_gated: bool
) -> tuple[PackedExperts, torch.Tensor]:
    """Experts and their numbers [E, N, K] float32."""
    parts = [
        draw(kind, num_columns, inner, device, is_gated=is_gated, is_whole=True, seed=expert)
        for expert in range(num_experts)
    ]
    experts = stack_experts([packed for packed, _ in parts])
    assert experts is not None
    return experts, torch.stack([numbers.float() for _, numbers in parts])


def both_products(
    x: torch.Tensor, activated: torch.Tensor, gate_up: PackedExperts, down: PackedExperts, rows: ExpertRows,
    tiles: PairTiles | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The outputs, poisoned with NaN before."""
    gated = poisoned(len(activated), gate_up.num_columns // 2, dtype=x.dtype, device=x.device.type)
    shape = rows.num_active, rows.num_rows, down.num_columns
    out = poisoned(*shape, dtype=torch.float32, device=x.device.type)
    packed_gated_expert_multiply(x, gate_up, rows, gated, tiles)
    packed_expert_multiply(activated, down, rows, out, tiles)
    return gated, out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int16 if a.dtype == BF16 else torch.int32
    return torch.equal(a.view(kind), b.view(kind))


@pytest.mark.kernel
@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_the_reference_with_any_tiles(
    kind: QuantisedFormat, shape: tuple[int, ...], device: str
) -> None:
    num_rows, num_experts, num_active, num_columns, inner = shape
    rows = routed(num_rows, num_experts, num_active, device)
    gate_up, up_numbers = drawn_experts(kind, num_experts, 2 * num_columns, inner, device, is_gated=True)
    down, down_numbers = drawn_experts(kind, num_experts, num_columns, inner, device, is_gated=False)
    for dtype in DTYPES:
        x = 3 * drawn(num_rows, inner, dtype=dtype, device=device)
        activated = drawn(num_rows * num_active, inner, dtype=dtype, device=device)
        expected_gated = gated_expert_multiply_reference(x, up_numbers, None, rows.experts)
        expected = expert_multiply_reference(activated, down_numbers, None, rows.experts, rows.shares)
        first = both_products(x, activated, gate_up, down, rows, None)
        assert_rows_near(first[0], expected_gated, inner)
        assert_rows_near(first[1].to(dtype), expected.to(dtype), inner)  # rounded so before they are weighted
        for tiles in TILES if has_programs(gate_up.weight, dtype) else ():
            if tiles.fits(gate_up.weight):
                found = both_products(x, activated, gate_up, down, rows, tiles)
                assert same_bits(found[0], first[0]) and same_bits(found[1], first[1]), tiles


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
@pytest.mark.parametrize("kind", FORMATS[::2], ids=str)
def test_large_products_are_near_the_reference(
    kind: QuantisedFormat, shape: tuple[int, ...], device: str
) -> None:
    test_products_are_near_the_reference_with_any_tiles(kind, shape, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS[:5], ids=str)
def test_bits_of_one_expert_are_those_of_its_weight_alone(kind: QuantisedFormat, device: str) -> None:
    """So many panels that one warpgroup has all columns of a dense product, too."""
    rows = routed(20, 1, 1, device)
    rows.experts.fill_(0)
    rows.shares.fill_(1.0)
    list_rows(rows)
    packed, _ = draw(kind, 17_024, 448, device, is_whole=True)
    experts = stack_experts([packed])
    assert experts is not None
    x = drawn(20, 448, dtype=BF16, device=device)
    sums, out = (poisoned(1, 20, 17_024, dtype=torch.float32, device=device) for _ in range(2))
    quantised_multiply(x, packed, sums)
    packed_expert_multiply(x, experts, rows, out)
    assert torch.equal(out, sums.to(BF16).float())


@pytest.mark.kernel
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_experts_of_no_row_and_of_all_rows(num_rows: int, device: str) -> None:
    rows = routed(num_rows, 8, 2, device)
    gate_up, _ = drawn_experts(FORMATS[0], 8, 128, 192, device, is_gated=True)
    down, numbers = drawn_experts(FORMATS[0], 8, 64, 192, device, is_gated=False)
    x = drawn(num_rows, 192, dtype=DTYPES[-1], device=device)
    activated = drawn(num_rows * 2, 192, dtype=DTYPES[-1], device=device)
    rows.experts.fill_(-1)
    list_rows(rows)
    assert all(out.isnan().all() for out in both_products(x, activated, gate_up, down, rows, None))
    rows.experts.copy_(torch.tensor([7, 0]).expand(num_rows, 2))
    rows.shares.fill_(0.5)
    list_rows(rows)
    _, out = both_products(x, activated, gate_up, down, rows, None)
    expected = expert_multiply_reference(activated, numbers, None, rows.experts, rows.shares)
    assert_rows_near(out, expected, 192)


@pytest.mark.kernel
def test_rows_change_no_bits_of_others(device: str) -> None:
    """NaN and infinity in a row remain there, and the number of rows makes no difference. The interpreter
    warns of infinity times zero."""
    rows, alone = routed(16, 4, 2, device), routed(1, 4, 2, device)
    alone.experts.copy_(rows.experts[:1])
    alone.shares.copy_(rows.shares[:1])
    list_rows(alone)
    gate_up, _ = drawn_experts(FORMATS[1], 4, 128, 320, device, is_gated=True)
    down, _ = drawn_experts(FORMATS[1], 4, 64, 320, device, is_gated=False)
    x = drawn(16, 320, dtype=DTYPES[-1], device=device)
    activated = drawn(32, 320, dtype=DTYPES[-1], device=device)
    found = []
    for value in (0.0, torch.nan, torch.inf)[: 3 if device == "cuda" else 2]:
        x[4], activated[8:10] = value, value
        gated, out = both_products(x, activated, gate_up, down, rows, None)
        gated[8:10], out[:, 4] = 0.0, 0.0
        found.append((gated, out))
    assert all(same_bits(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))
    gated, out = both_products(x[:1], activated[:2], gate_up, down, alone, None)
    assert same_bits(gated, found[0][0][:2]) and same_bits(out, found[0][1][:, :1].contiguous())


def packed_of(kind: QuantisedFormat, num_columns: int = 64, inner: int = 128) -> PackedWeight:
    return draw(kind, num_columns, inner, "cpu", is_whole=True)[0]


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 64, 200, 300, 512, 8192])
def test_tiles_fit_every_format(kind: QuantisedFormat, num_rows: int) -> None:
    experts = stack_experts([packed_of(kind)] * 3)
    assert experts is not None and experts.num_columns == 64
    rows = ExpertRows.take(
        lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), num_rows, 128, 8
    )
    tiles = choose_pair_tiles(experts, rows)
    assert tiles.fits(experts.weight) and tiles.num_stages >= 2
    assert tiles.num_threads <= 1024
    assert tiles.num_row_tiles(rows) * tiles.num_rows >= num_rows * 8 / tiles.num_rows


def test_no_distribution_of_rows_has_more_tiles() -> None:
    generator = torch.Generator().manual_seed(0)
    tiles = PairTiles(1, 8, 2, 2)
    for num_rows in (1, 2, 9, 64, 300):
        rows = ExpertRows.take(
            lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), num_rows, 16, 4
        )
        for spread in (1.0, 9.0):
            logits = spread * torch.randn(16, generator=generator) + torch.rand(
                num_rows, 16, generator=generator
            )
            counts = logits.topk(4).indices.flatten().bincount(minlength=16)
            assert ((counts + 7) // 8).sum() <= tiles.num_row_tiles(rows)


def test_experts_of_several_formats_or_ragged_panels_are_not_stacked() -> None:
    fp8, int4, zeros = (packed_of(FORMATS[index]) for index in (1, 3, 4))
    assert stack_experts([fp8, fp8]) is not None
    assert stack_experts([int4, zeros]) is None
    assert stack_experts([fp8, int4]) is None
    assert stack_experts([packed_of(FORMATS[1], 96)] * 2) is None
    assert stack_experts([fp8, packed_of(FORMATS[1], 128)]) is None


def test_arguments_are_checked() -> None:
    rows = ExpertRows.take(
        lambda _, shape, dtype: torch.empty(shape, dtype=dtype), num_rows=2, num_experts=3, num_active=2
    )
    experts = stack_experts([packed_of(FORMATS[0])] * 3)
    assert experts is not None
    x, out = torch.zeros(4, 128, dtype=BF16), torch.zeros(2, 2, 64)
    with pytest.raises(ValueError, match=r"x: \[3, 128\]"):
        packed_expert_multiply(x[:3], experts, rows, out)
    with pytest.raises(ValueError, match="out: "):
        packed_expert_multiply(x, experts, rows, out.double())
    with pytest.raises(ValueError, match="experts: 2: expected 3"):
        packed_expert_multiply(x, replace(experts, num_experts=2), rows, torch.zeros(2, 2, 96))
    with pytest.raises(ValueError, match="is_gated=False: expected True"):
        packed_gated_expert_multiply(x[:2], experts, rows, torch.zeros(4, 32, dtype=BF16))
