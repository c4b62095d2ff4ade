"""Tiles of the products of CUDA C++, as they follow from rows and shapes."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from drift_sdk._kernels.common.gpu_limits import HOPPER, limited_gpu
from drift_sdk._kernels.experts.cuda_products import (
    MAX_SCALE,
    SMALL,
    CudaTiles,
    cuda_tiles,
    has_cuda_product,
)
from drift_sdk._kernels.experts.cuda_routing import has_cuda_route
from drift_sdk._kernels.experts.expert_tiles import ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows


def rows_of(num_rows: int, num_experts: int, num_active: int) -> ExpertRows:
    return ExpertRows.take(
        lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        num_rows,
        num_experts,
        num_active,
    )


def quantised_matrix(inner: int) -> ExpertMatrix:
    values = torch.empty(2, 16, inner // 2, dtype=torch.uint8, device="meta")
    return ExpertMatrix(values, torch.empty(2, 16, inner // 32, dtype=torch.uint8, device="meta"), None)


@pytest.mark.parametrize("inner, num_stages", [(2880, 4), (256, 3), (32, 2)])
def test_only_chunks_of_the_next_tile_are_copied_ahead(inner: int, num_stages: int) -> None:
    tiles = CudaTiles()
    assert tiles.num_stages(inner) == num_stages
    # Warps, and of each chunks of 32 rows and the scales of two tiles.
    assert tiles.shared_bytes(inner) == 8 * (num_stages * 32 * 64 + 2 * (32 * (inner // 32) + 16))


@pytest.mark.parametrize("num_rows", [1, 64, 512])
@pytest.mark.parametrize("inner", [32, 2880, 4096, 7168, 32_768])
@pytest.mark.parametrize("kibibytes", [228, 164, 100])
def test_tiles_fit_a_multiprocessor(kibibytes: int, inner: int, num_rows: int) -> None:
    shared = kibibytes * 1024
    limits = replace(HOPPER, shared_bytes=shared - 1024, multiprocessor_shared_bytes=shared)
    with limited_gpu(limits):
        tiles = cuda_tiles(rows_of(num_rows, 128, 4), inner)
        assert tiles.fits(inner) or not SMALL.fits(inner)
        assert SMALL.fits(4096)


@pytest.mark.parametrize(
    "num_rows, num_experts, num_active", [(1, 128, 4), (3, 2, 2), (64, 128, 4), (300, 5, 1)]
)
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_there_are_never_more_items_than_counted(
    num_rows: int, num_experts: int, num_active: int, row_tiles: int
) -> None:
    """All rows with the same experts, rows spread evenly, and anything drawn between."""
    tiles = CudaTiles(row_tiles=row_tiles)
    most = tiles.num_items(rows_of(num_rows, num_experts, num_active), 96)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.1, 1.0, 100.0):
        preferred = torch.arange(num_experts) / spread if spread else torch.arange(num_experts) * 1e6
        drawn = torch.rand(num_rows, num_experts, generator=generator) + preferred
        counts = drawn.topk(num_active).indices.flatten().bincount(minlength=num_experts)
        num_row_tiles = (counts + 8 * row_tiles - 1) // (8 * row_tiles)
        assert int(num_row_tiles.sum()) * 3 <= most


def test_many_rows_of_an_expert_have_larger_tiles() -> None:
    assert cuda_tiles(rows_of(64, 128, 4), 2880).row_tiles == 1
    assert cuda_tiles(rows_of(256, 128, 4), 2880).row_tiles > 1


def test_programs_need_a_gpu() -> None:
    assert not has_cuda_product(quantised_matrix(64), torch.bfloat16, MAX_SCALE)
    assert not has_cuda_route(torch.empty(128, 64, dtype=torch.bfloat16), 4)
