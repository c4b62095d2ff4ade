"""Random matrices of experts and routing, and the comparison of their products with the references."""

from __future__ import annotations

import torch
from tolerances import assert_near

from drift_sdk._kernels.experts.expert_gemm import ClampedActivation, ExpertMatrix
from drift_sdk._kernels.experts.routing import ExpertRows, list_rows
from drift_sdk.loading.stored_formats import dequantise_mxfp4

CLAMPED = ClampedActivation(1.702, 7.0)
LARGEST = 8.0
"""An upper bound of most sums."""


def routed(num_rows: int, num_experts: int, num_active: int, device: str) -> ExpertRows:
    """Random experts and weights; every fourth row is padding."""

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=device)

    generator = torch.Generator().manual_seed(num_rows)
    rows = ExpertRows.take(take, num_rows, num_experts, num_active)
    experts = torch.rand(num_rows, num_experts, generator=generator).topk(num_active).indices
    experts[3::4] = -1
    rows.experts.copy_(experts)
    rows.shares.copy_(torch.rand(num_rows, num_active, generator=generator))
    list_rows(rows)
    return rows


def drawn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(shape[-1])
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def dense_matrix(
    num_experts: int, num_columns: int, inner: int, dtype: torch.dtype, device: str
) -> ExpertMatrix:
    values = drawn(num_experts, num_columns, inner, dtype=dtype, device=device) * inner**-0.5
    return ExpertMatrix(values, None, drawn(num_experts, num_columns, dtype=dtype, device=device))


def quantised_matrix(
    num_experts: int, num_columns: int, inner: int, dtype: torch.dtype, device: str
) -> tuple[ExpertMatrix, torch.Tensor]:
    """A matrix in MXFP4, and the same dequantised."""
    generator = torch.Generator().manual_seed(inner)
    shape = num_experts, num_columns, inner // 32
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8).to(device)
    scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8).to(device)
    bias = drawn(num_experts, num_columns, dtype=dtype, device=device)
    return ExpertMatrix(blocks.flatten(2), scales, bias), dequantise_mxfp4(blocks, scales, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_rows_near(found: torch.Tensor, expected: torch.Tensor, inner: int) -> None:
    """Rows of padding must not have been written: both are NaN there. The error of a gated product grows with
    the other factor."""
    num_roundings = 0 if found.dtype == torch.float32 else 4
    magnitude = max(LARGEST, expected.nan_to_num().abs().max().item())
    assert_near(found, expected, inner=inner, depth=2, magnitude=magnitude, num_roundings=num_roundings)
