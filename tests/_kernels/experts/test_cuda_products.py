"""Products of experts in CUDA C++: near the references, the same bits for any rows and tiles, and those of
dequantised weights. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from expert_matrices import (
    CLAMPED,
    assert_rows_near,
    drawn,
    poisoned,
    quantised_matrix,
    routed,
)
from references.experts import expert_multiply_reference, gated_expert_multiply_reference

from drift_sdk._kernels.experts.cuda_experts import (
    MAX_SCALE,
    AnyTiles,
    CudaTiles,
    WideTiles,
    cuda_expert_multiply,
    cuda_gated_expert_multiply,
    has_cuda_product,
)
from drift_sdk._kernels.experts.expert_gemm import ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows, list_rows
from drift_sdk.loading.stored_formats import dequantise_mxfp4

pytestmark = pytest.mark.gpu

BF16, DEVICE = torch.bfloat16, "cuda"
# Rows, experts, experts of a row, columns of the output, inner dimension.
SHAPES = (
    (1, 128, 4, 2880, 2880),
    (7, 32, 4, 2880, 2880),
    (64, 128, 8, 768, 2048),
    (40, 3, 2, 72, 96),
    (300, 5, 1, 50, 160),
    (300, 4, 2, 2880, 2880),
)
TILES: tuple[AnyTiles, ...] = (
    CudaTiles(),
    CudaTiles(row_tiles=2, num_ctas=1),
    CudaTiles(row_tiles=4, num_ctas=1),
    CudaTiles(weight_tiles=1, num_ctas=3, max_depth=4),
    CudaTiles(weight_tiles=4, row_tiles=2, num_ctas=1, max_depth=4),
    WideTiles(),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_products_are_near_the_reference_with_any_tiles(shape: tuple[int, ...]) -> None:
    num_rows, num_experts, num_active, num_columns, inner = shape
    rows = routed(num_rows, num_experts, num_active, DEVICE)
    x = 3 * drawn(num_rows, inner, dtype=BF16, device=DEVICE)
    matrix, values = quantised_matrix(num_experts, 2 * num_columns, inner, BF16, DEVICE)
    expected = gated_expert_multiply_reference(x, values, matrix.bias, rows.experts, CLAMPED)
    found = []
    for tiles in TILES:
        out = poisoned(num_rows * num_active, num_columns, dtype=BF16, device=DEVICE)
        cuda_gated_expert_multiply(x, matrix, rows, out, CLAMPED, tiles)
        found.append(out.nan_to_num(nan=1e30))
        assert_rows_near(out, expected, inner)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_the_reference_with_any_tiles(shape: tuple[int, ...]) -> None:
    num_rows, num_experts, num_active, num_columns, inner = shape
    rows = routed(num_rows, num_experts, num_active, DEVICE)
    x = drawn(num_rows * num_active, inner, dtype=BF16, device=DEVICE)
    matrix, values = quantised_matrix(num_experts, num_columns, inner, BF16, DEVICE)
    expected = expert_multiply_reference(x, values, matrix.bias, rows.experts, rows.shares)
    found = []
    for tiles in TILES:
        out = poisoned(num_active, num_rows, num_columns, dtype=torch.float32, device=DEVICE)
        cuda_expert_multiply(x, matrix, rows, out, tiles)
        found.append(out.nan_to_num(nan=1e30))
        assert_rows_near(out.to(BF16), expected.to(BF16), inner)
    assert all(torch.equal(found[0], other) for other in found)


def only(rows: ExpertRows, row: int) -> ExpertRows:
    """The routing of one row alone."""
    alone = ExpertRows(
        experts=rows.experts[row : row + 1].clone(),
        shares=rows.shares[row : row + 1].clone(),
        pairs=torch.empty(rows.num_experts, 1, dtype=torch.int32, device=DEVICE),
        counts=torch.empty_like(rows.counts),
    )
    list_rows(alone)
    return alone


def test_row_has_the_bits_that_it_has_alone() -> None:
    num_rows, num_experts, num_active, size = 150, 6, 3, 288
    rows = routed(num_rows, num_experts, num_active, DEVICE)
    x = drawn(num_rows, size, dtype=BF16, device=DEVICE)
    gate_up, _ = quantised_matrix(num_experts, 2 * size, size, BF16, DEVICE)
    down, _ = quantised_matrix(num_experts, size, size, BF16, DEVICE)

    def run(x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        activated = poisoned(rows.num_rows * num_active, size, dtype=BF16, device=DEVICE)
        out = poisoned(num_active, rows.num_rows, size, dtype=torch.float32, device=DEVICE)
        cuda_gated_expert_multiply(x, gate_up, rows, activated, CLAMPED)
        cuda_expert_multiply(activated, down, rows, out)
        return out

    together = run(x, rows)
    for row in (0, 1, 70, 148):
        assert torch.equal(run(x[row : row + 1], only(rows, row)), together[:, row : row + 1])
    assert together[:, 3].isnan().all()  # a row of padding


def test_sums_of_warps_are_added_in_ascending_order() -> None:
    """A one that is added to 2 ** 24 is lost; it remains where the large numbers cancel first."""
    inner, num_columns = 2880, 32
    rows = routed(2, 1, 1, DEVICE)
    rows.experts.fill_(0)
    rows.shares.fill_(1.0)
    list_rows(rows)
    ones = torch.full((1, num_columns, inner // 2), 0x22, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((1, num_columns, inner // 32), 127, dtype=torch.uint8, device=DEVICE)
    large = 2.0**24
    x = torch.zeros(2, inner, dtype=BF16, device=DEVICE)
    chunk = 128
    x[0, 0], x[0, 1 * chunk], x[0, 7 * chunk] = large, 1.0, -large
    x[1, 8 * chunk + 5], x[1, 2 * chunk], x[1, 3 * chunk] = large, -large, 1.0
    out = poisoned(1, 2, num_columns, dtype=torch.float32, device=DEVICE)
    cuda_expert_multiply(x, ExpertMatrix(ones, scales, None), rows, out)
    assert out[0].tolist() == [[0.0] * num_columns, [1.0] * num_columns]


def test_all_codes_and_scales_are_exact() -> None:
    """Each column of x alone, so that a product is one number of the matrix."""
    blocks = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    codes = (blocks[:, None] | blocks.flip(0)[None] << 4).expand(1, 16, 16).contiguous()  # [E, rows, K / 2]
    x = torch.eye(32, dtype=BF16, device=DEVICE)
    rows = routed(32, 1, 1, DEVICE)
    rows.experts.fill_(0)
    rows.shares.fill_(1.0)
    list_rows(rows)
    for scale in (3, 60, 126, 127, MAX_SCALE):
        scales = torch.full((1, 16, 1), scale, dtype=torch.uint8, device=DEVICE)
        out = poisoned(1, 32, 16, dtype=torch.float32, device=DEVICE)
        cuda_expert_multiply(x, ExpertMatrix(codes, scales, None), rows, out)
        expected = dequantise_mxfp4(codes.view(1, 16, 1, 16), scales, torch.float32)[0].T
        assert torch.equal(out[0], expected)


def test_matrix_that_the_program_does_not_compute_is_named() -> None:
    matrix, _ = quantised_matrix(2, 16, 64, BF16, DEVICE)
    assert has_cuda_product(matrix, BF16, MAX_SCALE)
    assert not has_cuda_product(matrix, BF16, MAX_SCALE + 1)
    assert not has_cuda_product(matrix, torch.float32, 0)
