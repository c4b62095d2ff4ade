"""Noise inside a kernel against the reference in torch."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from tolerances import assert_near

from drift_sdk._kernels.launch.kernel import kernel
from drift_sdk._kernels.sampling.rows import LEAST_NOISE, MOST_NOISE, exponential, gumbel
from drift_sdk.execution.eager.sampling import gumbel_noise

pytestmark = pytest.mark.kernel

SIZE = 256


@kernel
def _noise(
    seeds_ptr,  # [R] int64
    positions_ptr,  # [R] int32
    out_ptr,  # [R, blocks * SIZE] fp32, written
    SIZE: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    noise = gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), block * SIZE, SIZE)
    tl.store(out_ptr + (row * tl.num_programs(1) + block) * SIZE + tl.arange(0, SIZE), noise)


@kernel
def _exponentials(
    uniforms_ptr,  # [N] fp32
    out_ptr,  # [N] fp32, written
    SIZE: tl.constexpr,
):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + index, exponential(tl.load(uniforms_ptr + index)))


def test_gumbel_equals_reference(device: str) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 7 << 32], device=device)
    positions = torch.tensor([0, 1, 2**31 - 1, 12345, 7, 99], dtype=torch.int32, device=device)
    out = torch.full((6, 4 * SIZE), torch.nan, device=device)
    _noise[(6, 4)](seeds, positions, out, SIZE)
    expected = gumbel_noise(seeds, positions.to(torch.int64), 4 * SIZE)
    assert_near(out, expected, inner=1)
    assert torch.unique(out).numel() > 0.99 * out.numel()


def test_exponential_is_precise_for_all_uniforms(device: str) -> None:
    powers = 2.0 ** -torch.arange(1, 34, dtype=torch.float64)
    uniforms = torch.cat([powers, powers * 1.37, 1 - powers[:24], torch.linspace(0.001, 0.999, 1024)])
    uniforms = torch.cat([uniforms, torch.full((-len(uniforms) % SIZE,), 0.25)]).float().to(device)
    out = torch.full_like(uniforms, torch.nan)
    _exponentials[(len(uniforms) // SIZE,)](uniforms, out, SIZE)
    expected = -torch.log1p(-uniforms.double())
    assert ((out.double() - expected) / expected).abs().max() < 16 * torch.finfo(torch.float32).eps


def test_noise_bounds_are_rounded_outwards() -> None:
    most = -torch.log(-torch.log1p(-torch.tensor(2.0**-33, dtype=torch.float64)))
    least = -torch.log(-torch.log1p(-torch.tensor(1 - 2.0**-24, dtype=torch.float64)))
    assert most + 1e-4 < MOST_NOISE.value < most + 0.1
    assert least - 0.1 < LEAST_NOISE.value < least - 1e-4
