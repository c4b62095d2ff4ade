from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from drift_sdk._kernels.gemm.gemm import (
    ROW_TILE,
    FewRowsTiles,
    GemmConfig,
    few_rows_multiply,
    few_rows_tiles,
    has_few_rows_product,
    multiply,
)
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.launch.gpu_limits import HOPPER

pytestmark = pytest.mark.kernel

SHAPES = ((2880, 4096), (5120, 2880), (6144, 4096), (128, 2880), (16, 64), (2048, 512))
"""Slices of equal sizes, one that is shorter, one chunk alone, CTAs of one to six tiles, and more steps than
fit shared memory."""


def config_of(num_columns: int, inner: int) -> GemmConfig:
    return GemmConfig(num_slices=num_slices(num_columns, inner))


def tiles_of(num_columns: int, inner: int) -> FewRowsTiles | None:
    return few_rows_tiles(num_columns, inner, config_of(num_columns, inner), HOPPER)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_has_a_warp_and_shared_memory(shape: tuple[int, int]) -> None:
    num_columns, inner = shape
    tiles, config = tiles_of(num_columns, inner), config_of(num_columns, inner)
    assert tiles is not None
    assert tiles.num_ctas * config.num_slices <= HOPPER.num_multiprocessors
    assert 16 * tiles.num_ctas * tiles.num_tiles >= num_columns
    assert tiles.num_threads in (128, 256) and tiles.num_threads >= 32 * tiles.num_tiles
    x_bytes = config.slice_size(inner) // 64 * 1024
    # wgmma reads four tiles of each warpgroup, also from the last chunk.
    read = -(-tiles.num_tiles // 4) * 4 - tiles.num_tiles + 2 * tiles.num_stages * tiles.num_tiles
    assert x_bytes + read * 2048 <= tiles.shared_bytes <= HOPPER.shared_bytes


@pytest.mark.parametrize(
    "num_columns, inner",
    [(201_088, 2880), (4104, 4096), (4096, 4000), (4096, 14_336)],
    ids=["more tiles than warps", "part of a tile", "part of a chunk", "little room for a slice"],
)
def test_other_weights_are_left_to_the_general_kernel(num_columns: int, inner: int) -> None:
    assert tiles_of(num_columns, inner) is None


def test_slices_that_are_not_spread_are_left_to_the_general_kernel() -> None:
    config = replace(config_of(4096, 4096), is_spread=False)
    assert few_rows_tiles(4096, 4096, config, HOPPER) is None


def test_only_few_rows_of_bfloat16_on_a_gpu_are_computed() -> None:
    weight, config = torch.zeros(64, 128), config_of(64, 128)
    for x in (torch.zeros(1, 128), torch.zeros(1, 128, dtype=torch.bfloat16)):
        assert not has_few_rows_product(x, weight.to(x.dtype), config)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_the_general_kernel(shape: tuple[int, int], device: str) -> None:
    num_columns, inner = shape
    config = config_of(num_columns, inner)
    generator = torch.Generator(device).manual_seed(inner)
    weight = torch.randn(num_columns, inner, generator=generator, device=device).to(torch.bfloat16)
    rows = torch.randn(ROW_TILE, inner, generator=generator, device=device)
    # Numbers of several magnitudes, whose sums depend most on their order.
    rows[1::2] *= torch.exp2(torch.randint(-6, 7, rows[1::2].shape, generator=generator, device=device))
    expected = torch.full((config.num_partials, len(rows), num_columns), torch.nan, device=device)
    multiply(rows.to(torch.bfloat16), weight, expected, config)
    for num_rows in (1, 2, 7, 8):
        x = rows[:num_rows].to(torch.bfloat16)
        out = torch.full((config.num_partials, num_rows, num_columns), torch.nan, device=device)
        few_rows_multiply(x, weight, out, config)
        assert torch.equal(out, expected[:, :num_rows])


def test_errors_name_the_argument() -> None:
    x, weight = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out: \[1, 1, 63\] torch.float32: expected \[1, 1, 64\]"):
        few_rows_multiply(x, weight, torch.zeros(1, 1, 63), GemmConfig())

    with pytest.raises(ValueError, match=r"weight: \[68, 128\]: expected"):
        few_rows_multiply(x, torch.zeros(68, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 68), GemmConfig())

    with pytest.raises(ValueError, match=r"x.shape\[0\]"):
        few_rows_multiply(x.expand(9, 128).contiguous(), weight, torch.zeros(1, 9, 64), GemmConfig())
