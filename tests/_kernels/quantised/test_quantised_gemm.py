from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantised_cases import FORMATS, QuantisedFormat, draw
from references.layers import activate_reference
from tolerances import assert_near

from drift_sdk._kernels.quantised import packing
from drift_sdk._kernels.quantised.packing import PackedWeight, pack_weight
from drift_sdk._kernels.quantised.quantised_gemm import (
    Tiles,
    choose_tiles,
    num_splits,
    quantised_gated_multiply,
    quantised_multiply,
    twin_gated_multiply,
    twin_multiply,
)
from drift_sdk.spec.model import Activation

pytestmark = pytest.mark.kernel

SMALL = ((1, 16, 64), (3, 40, 576), (17, 33, 200))
LARGE = (
    (1, 6144, 4096),
    (7, 4104, 4096),
    (64, 960, 576),
    (65, 1000, 2560),
    (256, 576, 1536),
    (9, 4096, 14336),
)
LARGEST = 6.0
"""An upper bound of most products: their standard deviation is about 1."""


def shapes() -> tuple[tuple[int, int, int], ...]:
    return SMALL + LARGE if torch.cuda.is_available() else SMALL


def dtypes() -> tuple[torch.dtype, ...]:
    """Types that can be tested. The interpreter multiplies bfloat16 as if its bits were integers."""
    return (torch.bfloat16, torch.float32) if torch.cuda.is_available() else (torch.float32,)


def rows_of_x(num_rows: int, inner: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, inner, generator=generator, device=device).to(dtype)


def product(x: torch.Tensor, weight: PackedWeight, tiles: Tiles | None = None) -> torch.Tensor:
    out = torch.full((weight.num_slices, len(x), weight.num_columns), torch.nan, device=x.device)
    quantised_multiply(x, weight, out, tiles)
    return out


def gated_product(x: torch.Tensor, weight: PackedWeight, tiles: Tiles | None = None) -> torch.Tensor:
    out = x.new_full((len(x), weight.num_columns // 2), torch.nan)
    quantised_gated_multiply(x, weight, out, x.new_full((len(x), weight.num_columns), torch.nan), tiles=tiles)
    return out


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", shapes(), ids=str)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_product_is_near_the_exact_one(
    kind: QuantisedFormat, shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    num_rows, num_columns, inner = shape
    weight, numbers = draw(kind, num_columns, inner, device)
    x = rows_of_x(num_rows, inner, dtype, device)
    exact = x.double() @ numbers.T
    assert_near(product(x, weight).sum(0), exact, inner=inner, magnitude=LARGEST)
    out = torch.full((weight.num_slices, num_rows, num_columns), torch.nan, device=device)
    twin_multiply(x, weight, out)
    assert_near(out.sum(0), exact, inner=inner, magnitude=LARGEST)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[-1]], ids=str)
def test_gated_product_is_near_the_reference(
    kind: QuantisedFormat, dtype: torch.dtype, has_bias: bool, activation: Activation, device: str
) -> None:
    for num_rows, num_columns, inner in ((1, 16, 64), (17, 48, 192)):
        weight, numbers = draw(kind, num_columns, inner, device, is_gated=True)
        x = rows_of_x(num_rows, inner, dtype, device)
        bias = torch.linspace(-1.0, 1.0, num_columns, device=device).to(dtype)
        exact = x.double() @ numbers.T + (bias.double() if has_bias else 0.0)
        gate, up = exact.to(dtype).chunk(2, dim=1)
        expected = activate_reference(gate, activation) * up
        for multiply in (quantised_gated_multiply, twin_gated_multiply):
            out = x.new_full((num_rows, num_columns // 2), torch.nan)
            gate_up = x.new_full((num_rows, num_columns), torch.nan)
            multiply(x, weight, out, gate_up, activation, bias if has_bias else None)
            num_roundings = 0 if dtype == torch.float32 else 4
            assert_near(out, expected, inner=inner, depth=2, magnitude=LARGEST, num_roundings=num_roundings)


# Panels, rows, stages.
TILES = (
    Tiles(1, 8, 8),
    Tiles(2, 8, 4),
    Tiles(4, 8, 3),
    Tiles(7, 8, 3),
    Tiles(6, 16, 4),
    Tiles(5, 32, 4),
    Tiles(1, 16, 12),
    Tiles(1, 32, 8),
    Tiles(2, 64, 3),
    Tiles(4, 64, 2),
    Tiles(1, 64, 8),
    Tiles(2, 128, 4),
    Tiles(3, 128, 4),
    Tiles(1, 128, 2),
    Tiles(1, 128, 4),
)


def fitting(weight: PackedWeight) -> list[Tiles]:
    found = [tiles for tiles in TILES if tiles.fits(weight)]
    assert len(found) > 2
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (576, 1536), (6144, 576), (17408, 192), (34816, 64)], ids=str
)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_bits_depend_neither_on_rows_nor_on_tiles(
    kind: QuantisedFormat, shape: tuple[int, int], device: str
) -> None:
    weight, _ = draw(kind, *shape, device)
    x = rows_of_x(256, shape[1], torch.bfloat16, device)
    expected = torch.cat([product(row[None], weight, TILES[0]) for row in x], dim=1)
    for num_rows in (1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 129, 256):
        part = x[:num_rows].contiguous()
        assert torch.equal(product(part, weight), expected[:, :num_rows]), f"{num_rows} rows"
    for tiles in fitting(weight):
        for num_rows in (3, 64, 100):
            part = x[:num_rows].contiguous()
            assert torch.equal(product(part, weight, tiles), expected[:, :num_rows]), (
                f"{num_rows} rows, {tiles}"
            )


@pytest.mark.gpu
def test_bits_of_gated_products_depend_neither_on_rows_nor_on_tiles(device: str) -> None:
    for kind in (FORMATS[0], FORMATS[4]):
        weight, _ = draw(kind, 1536, 576, device, is_gated=True)
        x = rows_of_x(130, 576, torch.bfloat16, device)
        expected = torch.cat([gated_product(row[None], weight, TILES[0]) for row in x])
        for tiles in (None, *fitting(weight)):
            for num_rows in (1, 7, 64, 130):
                part = x[:num_rows].contiguous()
                assert torch.equal(gated_product(part, weight, tiles), expected[:num_rows]), (
                    f"{num_rows}, {tiles}"
                )


@pytest.mark.gpu
def test_sums_of_groups_are_added_by_warpgroup_in_ascending_order(device: str) -> None:
    """Sums of 2 ** 24, 1 and -(2 ** 24), added in float32, are 0 or 1, which shows the order."""
    ones = torch.full((64, 1024), 0x38, dtype=torch.uint8, device=device)
    scales = torch.ones(64, 8, device=device)
    weight = pack_weight(ones, scales, None, "e4m3", group_size=128, is_whole=True)
    assert num_splits(weight) == 2
    found = set()
    for steps in itertools.permutations((0, 1, 2, 4, 5), 3):
        x = torch.zeros(1, 1024, dtype=torch.bfloat16, device=device)
        sums = torch.zeros(8)
        for step, value in zip(steps, (2.0**24, 1.0, -(2.0**24)), strict=True):
            x[0, step * 128 + 5] = sums[step] = value
        totals = [torch.zeros(()), torch.zeros(())]
        for step in range(8):
            totals[step % 2] = totals[step % 2] + sums[step]
        expected = (totals[0] + totals[1]).item()
        found.add(expected)
        for tiles in fitting(weight):
            assert product(x, weight, tiles)[0, 0, 0].item() == expected, f"{steps}, {tiles}"
    assert found == {0.0, 1.0}


def test_tiles_fit_shared_memory_for_all_rows() -> None:
    for kind in FORMATS:
        for num_columns, inner in ((4096, 4096), (57344, 8192), (8192, 28672), (576, 1536), (64, 64)):
            weight, _ = draw(kind, 16, 64, "cpu")
            codes = torch.empty(-(-num_columns // 64), 0, dtype=torch.uint8)
            shaped = PackedWeight(
                **{name: getattr(weight, name) for name in weight.__struct_fields__}
                | {"codes": codes, "num_columns": num_columns, "inner": inner, "num_slices": 1}
            )
            for num_rows in range(1, 513):
                tiles = choose_tiles(shaped, num_rows)
                assert tiles.fits(shaped), f"{kind}, {num_columns}x{inner}, {tiles}"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_programs_are_those_of_compute_capability_9_0(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other GPUs, types and inner dimensions are left to the fallback."""
    monkeypatch.setattr(packing, "has_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def weight(inner: int, device: str = "cuda") -> Any:
        return SimpleNamespace(codes=SimpleNamespace(device=torch.device(device)), inner=inner)

    assert packing.has_programs(weight(64), torch.bfloat16) == (capability == (9, 0))
    assert not packing.has_programs(weight(64), torch.float16)
    assert not packing.has_programs(weight(96), torch.bfloat16)
    assert not packing.has_programs(weight(64, "cpu"), torch.bfloat16)


def test_errors_name_the_argument(device: str) -> None:
    weight, _ = draw(FORMATS[0], 32, 64, device)
    x = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match=r"out: \[2, 2, 32\] torch.float32: expected \[1, 2, 32\]"):
        quantised_multiply(x, weight, torch.zeros(2, 2, 32, device=device))
    with pytest.raises(ValueError, match=r"x: \[2, 32\] torch.float32: expected \[2, 64\]"):
        quantised_multiply(x[:, :32].contiguous(), weight, torch.zeros(1, 2, 32, device=device))
    with pytest.raises(ValueError, match="weight: not arranged for a gated product"):
        quantised_gated_multiply(
            x, weight, torch.zeros(2, 16, device=device), torch.zeros(2, 32, device=device)
        )
    gated, _ = draw(FORMATS[0], 32, 64, device, is_gated=True)
    with pytest.raises(ValueError, match="weight: arranged for a gated product"):
        quantised_multiply(x, gated, torch.zeros(1, 2, 32, device=device))
