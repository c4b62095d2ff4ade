"""Tiles of the products of CUDA C++, as they follow from rows and shapes."""

from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.experts.cuda_experts import (
    MAX_INNER,
    MAX_SCALE,
    CudaTiles,
    RingTiles,
    WideTiles,
    cuda_tiles,
    has_cuda_product,
    has_cuda_route,
    has_ring,
    has_wide_product,
)
from drift_sdk._kernels.experts.expert_gemm import ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk.spec.model import Router


def rows_of(num_rows: int, num_experts: int, num_active: int) -> ExpertRows:
    return ExpertRows.take(
        lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        num_rows,
        num_experts,
        num_active,
    )


def quantised_matrix(inner: int, num_columns: int = 16) -> ExpertMatrix:
    values = torch.empty(2, num_columns, inner // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(2, num_columns, inner // 32, dtype=torch.uint8, device="meta")
    return ExpertMatrix(values, scales, None)


@pytest.mark.parametrize("inner, depth", [(2880, 3), (2048, 2), (7168, 1), (8192, 4), (32, 1)])
def test_depth_divides_the_chunks_of_a_warp(inner: int, depth: int) -> None:
    assert CudaTiles(max_depth=4).depth(inner) == depth
    assert CudaTiles().depth(inner) == 1


@pytest.mark.parametrize(
    "num_rows, num_experts, num_active", [(1, 128, 4), (3, 2, 2), (64, 128, 4), (300, 5, 1)]
)
@pytest.mark.parametrize(
    "tiles, num_pairs, num_weight_rows",
    [(CudaTiles(), 8, 96), (CudaTiles(row_tiles=2), 16, 96), (WideTiles(), 64, 768)],
    ids=str,
)
def test_there_are_never_more_items_than_counted(
    num_rows: int,
    num_experts: int,
    num_active: int,
    tiles: CudaTiles | WideTiles,
    num_pairs: int,
    num_weight_rows: int,
) -> None:
    """All rows with the same experts, rows spread evenly, and anything drawn between. The weight has three
    tiles of rows."""
    most = tiles.num_items(rows_of(num_rows, num_experts, num_active), num_weight_rows)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.1, 1.0, 100.0):
        preferred = torch.arange(num_experts) / spread if spread else torch.arange(num_experts) * 1e6
        drawn = torch.rand(num_rows, num_experts, generator=generator) + preferred
        counts = drawn.topk(num_active).indices.flatten().bincount(minlength=num_experts)
        num_row_tiles = (counts + num_pairs - 1) // num_pairs
        assert int(num_row_tiles.sum()) * 3 <= most


def test_many_rows_of_an_expert_have_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    few, many = (cuda_tiles(rows_of(num_rows, 128, 4), quantised_matrix(64)) for num_rows in (64, 256))
    assert isinstance(few, CudaTiles) and few.row_tiles == 1
    assert isinstance(many, CudaTiles) and many.row_tiles == 2


def test_experts_with_very_many_rows_have_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    matrix = quantised_matrix(64, 32)
    assert isinstance(cuda_tiles(rows_of(1023, 128, 4), matrix), CudaTiles)
    assert cuda_tiles(rows_of(1024, 128, 4), matrix) == WideTiles()
    for num_columns in (30, 33):  # fewer rows than a warp has, and half a pair of gate and up
        few = quantised_matrix(64, num_columns)
        assert not has_wide_product(few)
        assert isinstance(cuda_tiles(rows_of(1024, 128, 4), few), CudaTiles)


def test_ring_is_used_until_experts_have_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = quantised_matrix(64)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert cuda_tiles(rows_of(1, 128, 4), matrix) == RingTiles(num_stages=3)
    assert cuda_tiles(rows_of(512, 128, 4), matrix) == cuda_tiles(rows_of(128, 32, 4), matrix) == RingTiles()
    assert isinstance(cuda_tiles(rows_of(513, 128, 4), matrix), CudaTiles)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (10, 0))
    assert isinstance(cuda_tiles(rows_of(8, 128, 4), matrix), CudaTiles)


def test_ring_needs_whole_tiles_and_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert has_ring(quantised_matrix(2880), RingTiles())
    assert not has_ring(quantised_matrix(2880), RingTiles(5, 2))
    assert has_ring(quantised_matrix(2880), RingTiles(8, 1))
    assert not has_ring(quantised_matrix(MAX_INNER + 32), RingTiles(1, 1))
    values = torch.empty(2, 24, 32, dtype=torch.uint8)
    scales = torch.empty(2, 24, 2, dtype=torch.uint8)
    assert not has_ring(ExpertMatrix(values, scales, None), RingTiles())
    values = torch.empty(2 * 16 * 32 + 8, dtype=torch.uint8)[8:].view(2, 16, 32)
    assert not has_ring(ExpertMatrix(values, scales[:, :16], None), RingTiles())


def test_programs_need_a_gpu() -> None:
    assert not has_cuda_product(quantised_matrix(64), torch.bfloat16, MAX_SCALE)
    router = Router(kind="softmax", is_normalised=True)
    assert not has_cuda_route(torch.empty(128, 64, dtype=torch.bfloat16), 4, router)
