from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.gemm import (
    GemmConfig,
    gated_multiply,
    gated_multiply_reference,
    multiply,
    multiply_reference,
)

pytestmark = pytest.mark.kernel

SMALL = ((1, 1, 1), (1, 33, 16), (3, 64, 96), (5, 40, 200), (17, 130, 64), (33, 16, 576))
LARGE = ((1, 6144, 4096), (4, 960, 576), (65, 4096, 4096), (384, 3072, 576), (7, 1002, 14336))
CONFIGS = (
    GemmConfig(1, True, 32, 16, 32, 2, 4),
    GemmConfig(2, True, 64, 16, 64, 3, 4),
    GemmConfig(2, False, 64, 32, 128, 3, 4),
    GemmConfig(4, False, 128, 64, 64, 3, 8),
    GemmConfig(4, True, 64, 16, 64, 3, 4),
)


def shapes() -> tuple[tuple[int, int, int], ...]:
    return SMALL + LARGE if torch.cuda.is_available() else SMALL


def dtypes() -> tuple[torch.dtype, ...]:
    """The interpreter multiplies bfloat16 as if it were integers."""
    return (torch.float32, torch.bfloat16, torch.float16) if torch.cuda.is_available() else (torch.float32,)


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_columns, inner = shape
    generator = torch.Generator(device).manual_seed(num_rows * num_columns)
    x = torch.randn(num_rows, inner, generator=generator, device=device)
    weight = torch.randn(num_columns, inner, generator=generator, device=device) * inner**-0.5
    return x.to(dtype), weight.to(dtype)


def inner_terms(shape: tuple[int, int, int]) -> float:
    return max(16.0, shape[2] ** 0.5)


def product(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    partials = torch.full((config.num_partials, x.shape[0], weight.shape[0]), torch.nan, device=x.device)
    multiply(x, weight, partials, config)
    total = partials[0]
    for part in partials[1:]:
        total = total + part

    return total


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_product(shape: tuple[int, int, int], config: GemmConfig, dtype: torch.dtype, device: str) -> None:
    x, weight = inputs(shape, dtype, device)
    found = product(x, weight, config)
    exact = x.double() @ weight.double().T
    # The rounding of a sum of `inner` terms of about inner**-0.5 each.
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6 * inner_terms(shape))
    torch.testing.assert_close(
        multiply_reference(x, weight, config), found, rtol=1e-5, atol=1e-6 * inner_terms(shape)
    )


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_bits_do_not_depend_on_rows_or_tiles(num_slices: int, device: str) -> None:
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    x, weight = inputs((200, 640, 1024) if is_gpu else (40, 70, 320), dtype, device)
    alone = GemmConfig(num_slices, True, 64, 16, 64, 3, 4)
    expected = torch.cat([product(row[None], weight, alone) for row in x])
    for config in (
        GemmConfig(num_slices, True, 64, 16, 128, 4, 4),
        GemmConfig(num_slices, True, 128, 64, 64, 3, 4),
        GemmConfig(num_slices, False, 64, 64, 64, 3, 4),
        GemmConfig(num_slices, False, 128, 128, 64, 3, 8),
    ):
        for num_rows in (1, 4, 33, len(x)):
            found = product(x[:num_rows].contiguous(), weight, config)
            if is_gpu:
                assert torch.equal(found, expected[:num_rows])
            else:  # the interpreter's products are BLAS's, whose order is its own
                torch.testing.assert_close(found, expected[:num_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_gated_product(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    num_rows, num_columns, inner = shape
    x, weight = inputs((num_rows, 2 * num_columns, inner), dtype, device)
    out = torch.full((num_rows, num_columns), torch.nan, dtype=dtype, device=device)
    gated_multiply(x, weight, out, GemmConfig(1, True, 32, 16, 64, 3, 4))
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(out, gated_multiply_reference(x, weight), rtol=tolerance, atol=tolerance)


def test_wrong_shapes_are_named() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"out: torch.float32 of shape \[1, 2, 5\].*\[1, 2, 4\]"):
        multiply(x, weight, torch.zeros(1, 2, 5), GemmConfig())

    with pytest.raises(ValueError, match=r"x: .*expected contiguous torch.float16"):
        multiply(x, weight.half(), torch.zeros(1, 2, 4), GemmConfig())
