"""Tiles of the products of CUDA C++, as they follow from rows and shapes."""

from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.experts.cuda_products import MAX_SCALE, CudaTiles, cuda_tiles, has_cuda_product
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


@pytest.mark.parametrize("inner, depth", [(2880, 3), (2048, 2), (7168, 1), (8192, 4), (32, 1)])
def test_depth_divides_the_chunks_of_a_warp(inner: int, depth: int) -> None:
    assert CudaTiles(max_depth=4).depth(inner) == depth
    assert CudaTiles().depth(inner) == 1


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
    assert cuda_tiles(rows_of(64, 128, 4)).row_tiles == 1
    assert cuda_tiles(rows_of(256, 128, 4)).row_tiles == 2


def test_programs_need_a_gpu() -> None:
    assert not has_cuda_product(quantised_matrix(64), torch.bfloat16, MAX_SCALE)
    assert not has_cuda_route(torch.empty(128, 64, dtype=torch.bfloat16), 4)
