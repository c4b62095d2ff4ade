from __future__ import annotations

import itertools

import pytest
import torch
from expert_matrices import (
    CLAMPED,
    LARGEST,
    assert_rows_near,
    dense_matrix,
    drawn,
    poisoned,
    quantised_matrix,
    routed,
)
from references.experts import expert_multiply_reference, gated_expert_multiply_reference
from tolerances import assert_near

from drift_sdk._kernels.experts.expert_gemm import (
    QUANTISED_TILE_K,
    ClampedActivation,
    ExpertGemmConfig,
    ExpertMatrix,
    expert_gemm_config,
    expert_multiply,
    gated_expert_multiply,
)
from drift_sdk._kernels.experts.routing import ExpertRows, list_rows
from drift_sdk._kernels.gemm.heuristic import SHARED_RESERVE
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, limited_gpu
from drift_sdk.loading.stored_formats import dequantise_mxfp4
from drift_sdk.spec.model import Activation
from perf.cross_compile import GPUS

pytestmark = pytest.mark.kernel

CONFIG = ExpertGemmConfig(32, 16, 32, 2, 4)

# Rows, experts, experts of a row, columns of the output, inner dimension.
SHAPES = ((1, 4, 2, 33, 64), (9, 3, 2, 64, 96), (40, 3, 1, 16, 160), (5, 6, 6, 40, 32))
LARGE = ((1, 16, 4, 2880, 2880), (64, 16, 4, 2880, 2880), (300, 32, 8, 768, 2048), (8, 32, 8, 2048, 768))


def shapes() -> tuple[tuple[int, int, int, int, int], ...]:
    return SHAPES + LARGE if torch.cuda.is_available() else SHAPES


def dtypes() -> tuple[torch.dtype, ...]:
    """Types that can be tested. The interpreter multiplies bfloat16 as if its bits were integers."""
    return (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", CLAMPED], ids=["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_gated_product_is_near_the_reference(
    shape: tuple[int, ...], activation: ClampedActivation | Activation, dtype: torch.dtype, device: str
) -> None:
    num_rows, num_experts, num_active, num_columns, inner = shape
    rows = routed(num_rows, num_experts, num_active, device)
    x = 3 * drawn(num_rows, inner, dtype=dtype, device=device)
    matrix = dense_matrix(num_experts, 2 * num_columns, inner, dtype, device)
    out = poisoned(num_rows * num_active, num_columns, dtype=dtype, device=device)
    gated_expert_multiply(x, matrix, rows, out, CONFIG, activation)
    expected = gated_expert_multiply_reference(x, matrix.values, matrix.bias, rows.experts, activation)
    assert_rows_near(out, expected, inner)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_product_is_near_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    num_rows, num_experts, num_active, num_columns, inner = shape
    rows = routed(num_rows, num_experts, num_active, device)
    x = drawn(num_rows * num_active, inner, dtype=dtype, device=device)
    matrix = dense_matrix(num_experts, num_columns, inner, dtype, device)
    out = poisoned(num_active, num_rows, num_columns, dtype=torch.float32, device=device)
    expert_multiply(x, matrix, rows, out, CONFIG)
    expected = expert_multiply_reference(x, matrix.values, matrix.bias, rows.experts, rows.shares)
    assert_near(
        out,
        expected,
        inner=inner,
        depth=2,
        magnitude=LARGEST,
        num_roundings=0 if dtype == torch.float32 else 2**16,  # of bfloat16, in units of float32
    )


def by_parity(values: torch.Tensor) -> torch.Tensor:
    """The last dimension in the order in which quantised products sum it: of every QUANTISED_TILE_K elements,
    the even ones before the odd ones. The last tile is filled with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % QUANTISED_TILE_K))
    tiles = padded.unflatten(-1, (-1, QUANTISED_TILE_K // 2, 2))
    return tiles.transpose(-1, -2).flatten(-3).contiguous()


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("activation", ["silu", CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("inner", [64, 128, 224])
def test_quantised_products_equal_their_dequantised_twins(
    inner: int, activation: ClampedActivation | Activation, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit, with the inner indices in the same order and tiles of the same size.

    The interpreter multiplies by BLAS, whose order of summation may depend on the layout in memory, so it
    gets small integers, of which no sum is rounded.
    """
    num_rows, num_experts, num_active, num_columns = 7, 5, 3, 48
    rows = routed(num_rows, num_experts, num_active, device)
    twin_config = ExpertGemmConfig(16, 16, QUANTISED_TILE_K // 2, 2, 4)
    config = ExpertGemmConfig(16, 16, 32, 2, 4)

    def activations(num_rows: int) -> torch.Tensor:
        values = drawn(num_rows, inner, dtype=dtype, device=device)
        return values if device == "cuda" else (2 * values).round()

    matrix, values = quantised_matrix(num_experts, 2 * num_columns, inner, dtype, device)
    twin = ExpertMatrix(by_parity(values), None, matrix.bias)
    x = activations(num_rows)
    found, expected = (
        poisoned(num_rows * num_active, num_columns, dtype=dtype, device=device) for _ in range(2)
    )
    gated_expert_multiply(x, matrix, rows, found, config, activation)
    gated_expert_multiply(by_parity(x), twin, rows, expected, twin_config, activation)
    assert torch.equal(found.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))
    assert found.isnan().all(dim=1).tolist() == (rows.experts.flatten() < 0).tolist()

    matrix, values = quantised_matrix(num_experts, num_columns, inner, dtype, device)
    twin = ExpertMatrix(by_parity(values), None, matrix.bias)
    x = activations(num_rows * num_active)
    found, expected = (
        poisoned(num_active, num_rows, num_columns, dtype=torch.float32, device=device) for _ in range(2)
    )
    expert_multiply(x, matrix, rows, found, config)
    expert_multiply(by_parity(x), twin, rows, expected, twin_config)
    assert torch.equal(found.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))
    reference = expert_multiply_reference(x, values, matrix.bias, rows.experts, rows.shares)
    assert_near(
        found, reference, inner=inner, magnitude=LARGEST, num_roundings=0 if dtype == torch.float32 else 2**16
    )


def test_all_codes_and_scales_are_exact(device: str) -> None:
    """A row of x picks a column of weights of which one half is zero, so nothing is rounded."""
    num_columns = 253
    codes = torch.arange(16, dtype=torch.uint8)
    row = torch.cat((codes | (15 - codes) << 4, codes[torch.arange(16)] << 4 | (15 - codes)))
    blocks = row.view(1, 1, 2, 16).expand(1, num_columns, 2, 16).contiguous()
    scales = torch.arange(num_columns, dtype=torch.uint8).view(1, -1, 1).expand(1, -1, 2).contiguous()
    values = dequantise_mxfp4(blocks, scales, torch.float32)
    matrix = ExpertMatrix(blocks.flatten(2).to(device), scales.to(device), None)
    rows = routed(64, 1, 1, device)
    rows.experts.fill_(0)
    rows.shares.fill_(1.0)
    list_rows(rows)
    out = poisoned(1, 64, num_columns, dtype=torch.float32, device=device)
    expert_multiply(torch.eye(64, device=device), matrix, rows, out, CONFIG)
    assert torch.equal(out[0].cpu(), values[0].T)


def test_bits_depend_neither_on_other_rows_nor_on_tiles(device: str) -> None:
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    num_rows, num_experts, num_active = (300, 32, 4) if is_gpu else (7, 3, 2)
    num_columns, inner = (320, 1024) if is_gpu else (40, 128)
    matrices = (
        dense_matrix(num_experts, num_columns, inner, dtype, device),
        quantised_matrix(num_experts, num_columns, inner, dtype, device)[0],
    )
    x = drawn(num_rows * num_active, inner, dtype=dtype, device=device)
    rows = routed(num_rows, num_experts, num_active, device)

    def product(matrix: ExpertMatrix, first: int, end: int, config: ExpertGemmConfig) -> torch.Tensor:
        part = ExpertRows(
            experts=rows.experts[first:end].contiguous(),
            shares=rows.shares[first:end].contiguous(),
            pairs=rows.pairs[:, : end - first].contiguous(),
            counts=rows.counts.clone(),
        )
        list_rows(part)
        out = torch.zeros(num_active, end - first, num_columns, device=device)
        expert_multiply(x[first * num_active : end * num_active], matrix, part, out, config)
        return out

    for matrix in matrices:
        alone = torch.cat(
            [product(matrix, row, row + 1, ExpertGemmConfig(64, 16, 64, 4, 4)) for row in range(num_rows)], 1
        )
        for config in (
            ExpertGemmConfig(64, 16, 128, 4, 4),
            ExpertGemmConfig(64, 64, 64, 3, 4),
            ExpertGemmConfig(128, 128, 64, 3, 8),
        ):
            together = product(matrix, 0, num_rows, config)
            if is_gpu:
                assert torch.equal(together, alone)
            else:  # the interpreter multiplies by BLAS, whose order of summation may depend on the shape
                assert_near(together, alone, inner=inner, magnitude=LARGEST)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 64])
def test_tiles_suffice_when_all_rows_have_the_same_experts(num_rows: int, device: str) -> None:
    """And when rows are spread over as many experts as there are."""
    num_experts, num_active, num_columns, inner = 8, 2, 16, 32
    for spread in (0, 1):
        rows = routed(num_rows, num_experts, num_active, device)
        first = torch.arange(num_rows, dtype=torch.int32) * 2 * spread
        rows.experts.copy_(torch.stack((first % 8, (first + 5) % 8), dim=1))
        list_rows(rows)
        matrix = dense_matrix(num_experts, num_columns, inner, torch.float32, device)
        x = drawn(num_rows * num_active, inner, dtype=torch.float32, device=device)
        out = poisoned(num_active, num_rows, num_columns, dtype=torch.float32, device=device)
        expert_multiply(x, matrix, rows, out, CONFIG)
        expected = expert_multiply_reference(x, matrix.values, matrix.bias, rows.experts, rows.shares)
        assert_near(out, expected, inner=inner, magnitude=LARGEST)


def test_the_configuration_follows_the_rows_of_an_expert() -> None:
    def rows(num_rows: int) -> ExpertRows:
        return ExpertRows.take(
            lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), num_rows, 32, 4
        )

    for is_gated in (True, False):
        for dtype, expected in (
            (torch.bfloat16, [16, 16, 64, 64, 128]),
            (torch.float32, [16, 16, 64, 64, 64]),
        ):
            found = [
                expert_gemm_config(rows(num_rows), dtype, is_gated=is_gated).tile_m
                for num_rows in (1, 64, 65, 512, 8192)
            ]
            assert found == expected


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_stages_fit_the_shared_memory_of_every_gpu(gpu: GpuLimits) -> None:
    with limited_gpu(gpu):
        for num_rows, num_experts, num_active in itertools.product(
            (1, 8, 64, 512, 8192), (8, 32, 128), (1, 2, 8)
        ):
            rows = ExpertRows.take(
                lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
                num_rows, num_experts, num_active,
            )  # fmt: skip
            for dtype, is_gated in itertools.product((torch.bfloat16, torch.float32), (True, False)):
                config = expert_gemm_config(rows, dtype, is_gated=is_gated)
                tile_rows = config.tile_n * (2 if is_gated else 1) + config.tile_m
                num_bytes = tile_rows * config.tile_k * dtype.itemsize * config.num_stages
                assert config.num_stages >= 2 and num_bytes + SHARED_RESERVE <= gpu.shared_bytes


def test_errors_name_the_argument(device: str) -> None:
    rows = routed(2, 4, 2, device)
    matrix = dense_matrix(4, 16, 64, torch.float32, device)
    out = torch.zeros(2, 2, 16, device=device)
    with pytest.raises(ValueError, match=r"x: \[2, 64\] torch.float32: expected \[4, 64\]"):
        expert_multiply(torch.zeros(2, 64, device=device), matrix, rows, out, CONFIG)
    quantised, _ = quantised_matrix(4, 16, 64, torch.float16, device)
    with pytest.raises(ValueError, match="x: torch.float16: expected torch.float32 or torch.bfloat16"):
        expert_multiply(torch.zeros(4, 64, dtype=torch.float16, device=device), quantised, rows, out, CONFIG)
