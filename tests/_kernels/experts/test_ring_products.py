"""Products of experts from a ring have the bits of those without. Needs a GPU of compute capability 9.0."""

from __future__ import annotations

import pytest
import torch
from expert_matrices import CLAMPED, drawn, poisoned, quantised_matrix, routed
from msgspec.structs import replace

from drift_sdk._kernels.experts.cuda_experts import (
    CAPABILITY,
    CudaTiles,
    RingTiles,
    cuda_expert_multiply,
    cuda_gated_expert_multiply,
    has_ring,
)
from drift_sdk._kernels.experts.expert_gemm import ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows, list_rows

pytestmark = pytest.mark.gpu

BF16, DEVICE = torch.bfloat16, "cuda"
RINGS = (RingTiles(), RingTiles(3, 2), RingTiles(8, 1), RingTiles(1, 1), RingTiles(2, 1))
# Experts, experts of a row, columns of the output, inner dimension. The last ones have fewer items than a GPU
# has CTAs, a band that is not whole, and chunks of 128 columns that are not.
SHAPES = ((32, 4, 2880, 2880), (128, 8, 768, 2048), (5, 2, 336, 96), (3, 1, 16, 160), (2, 2, 16, 32))
NUM_ROWS = (1, 2, 3, 7, 8, 9, 16, 31, 64, 129, 512)


@pytest.fixture(autouse=True)
def skip_other_gpus() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("needs compute capability 9.0")


def assert_same_bits(rows: ExpertRows, num_columns: int, inner: int, *, has_bias: bool = True) -> None:
    """Both products, with every ring, are those without one, in buffers poisoned with NaN."""
    num_rows, num_experts, num_active = rows.num_rows, rows.num_experts, rows.num_active

    def matrix(num_weight_rows: int) -> ExpertMatrix:
        made, _ = quantised_matrix(num_experts, num_weight_rows, inner, BF16, DEVICE)
        return made if has_bias else replace(made, bias=None)

    gate_up, down = matrix(2 * num_columns), matrix(num_columns)
    x = 3 * drawn(num_rows, inner, dtype=BF16, device=DEVICE)
    activated = drawn(num_rows * num_active, inner, dtype=BF16, device=DEVICE)

    def products(tiles: CudaTiles | RingTiles) -> tuple[torch.Tensor, torch.Tensor]:
        gated = poisoned(num_rows * num_active, num_columns, dtype=BF16, device=DEVICE)
        out = poisoned(num_active, num_rows, num_columns, dtype=torch.float32, device=DEVICE)
        cuda_gated_expert_multiply(x, gate_up, rows, gated, CLAMPED, tiles)
        cuda_expert_multiply(activated, down, rows, out, tiles)
        return gated.view(torch.int16), out.view(torch.int32)

    expected = products(CudaTiles())
    for ring in RINGS:
        assert has_ring(gate_up, ring) and has_ring(down, ring)
        found = products(ring)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), ring


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_bits_are_those_without_a_ring(shape: tuple[int, ...], *, has_bias: bool) -> None:
    num_experts, num_active, num_columns, inner = shape
    for num_rows in NUM_ROWS:
        rows = routed(num_rows, num_experts, num_active, DEVICE)
        assert_same_bits(rows, num_columns, inner, has_bias=has_bias)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("expert", [0, 3, 4, 127])
def test_all_rows_of_one_expert(num_rows: int, expert: int) -> None:
    rows = routed(num_rows, 128, 1, DEVICE)
    rows.experts.fill_(expert)
    list_rows(rows)
    assert_same_bits(rows, 336, 288)


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_no_row_has_an_expert(num_rows: int) -> None:
    rows = routed(num_rows, 8, 2, DEVICE)
    rows.experts.fill_(-1)
    list_rows(rows)
    assert_same_bits(rows, 64, 96)


def test_rows_change_no_bits_of_others() -> None:
    """NaN and infinity in a row remain there."""
    rows = routed(16, 4, 2, DEVICE)
    matrix, _ = quantised_matrix(4, 64, 288, BF16, DEVICE)
    x = drawn(32, 288, dtype=BF16, device=DEVICE)
    outs = []
    for value in (0.0, torch.nan, torch.inf):
        x[8:10] = value
        outs.append(poisoned(2, 16, 64, dtype=torch.float32, device=DEVICE))
        cuda_expert_multiply(x, matrix, rows, outs[-1], RingTiles())
        outs[-1][:, 4] = 0.0
    assert all(torch.equal(outs[0].view(torch.int32), out.view(torch.int32)) for out in outs)
