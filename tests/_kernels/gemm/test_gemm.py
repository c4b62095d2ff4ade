from __future__ import annotations

import pytest
import torch
from references.gemm import gated_multiply_reference, multiply_reference
from slow_cases import slow_after
from tolerances import assert_near

from drift_sdk._kernels.gemm.gemm import GemmConfig, gated_multiply, multiply

pytestmark = pytest.mark.kernel

SMALL = ((1, 1, 1), (1, 33, 16), (3, 64, 96), (2, 64, 128), (5, 40, 200), (17, 130, 64), (33, 16, 576))
LARGE = ((1, 6144, 4096), (4, 960, 576), (65, 4096, 4096), (384, 3072, 576), (7, 1002, 14336))
CONFIGS = (
    GemmConfig(True, 32, 16, 32, 2, 4, num_slices=1),
    GemmConfig(True, 64, 16, 64, 3, 4, num_slices=2),
    GemmConfig(False, 64, 32, 128, 3, 4, num_slices=2),
    GemmConfig(False, 128, 64, 64, 3, 8, num_slices=4),
    GemmConfig(True, 64, 16, 64, 3, 4, num_slices=4),
)


LARGEST = 4.0
"""An upper bound of most products: their standard deviation is 1."""


def shapes() -> tuple[tuple[int, int, int], ...]:
    return SMALL + LARGE if torch.cuda.is_available() else SMALL


def dtypes() -> tuple[torch.dtype, ...]:
    """Types that can be tested. The interpreter multiplies bfloat16 as if its bits were integers."""
    return (torch.float32, torch.bfloat16, torch.float16) if torch.cuda.is_available() else (torch.float32,)


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_columns, inner = shape
    generator = torch.Generator(device).manual_seed(num_rows * num_columns)
    x = torch.randn(num_rows, inner, generator=generator, device=device)
    weight = torch.randn(num_columns, inner, generator=generator, device=device) * inner**-0.5
    return x.to(dtype), weight.to(dtype)


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
def test_multiply_is_near_the_exact_product(
    shape: tuple[int, int, int], config: GemmConfig, dtype: torch.dtype, device: str
) -> None:
    x, weight = inputs(shape, dtype, device)
    found = product(x, weight, config)
    exact = x.double() @ weight.double().T
    assert_near(found, exact, inner=shape[2], magnitude=LARGEST)
    assert_near(multiply_reference(x, weight, config), found, inner=shape[2], magnitude=LARGEST)


@pytest.mark.parametrize("inner", slow_after(2, [80, 320, 1024]))
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_bits_do_not_depend_on_rows_or_tiles(num_slices: int, inner: int, device: str) -> None:
    """Slices of many tiles, of few, and of one."""
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    x, weight = inputs((200, 640, inner) if is_gpu else (40, 70, inner), dtype, device)
    alone = GemmConfig(True, 64, 16, 64, 3, 4, num_slices=num_slices)
    expected = torch.cat([product(row[None], weight, alone) for row in x])
    for config in (
        GemmConfig(True, 64, 16, 128, 4, 4, num_slices=num_slices),
        GemmConfig(True, 128, 64, 64, 3, 4, num_slices=num_slices),
        GemmConfig(False, 64, 64, 64, 3, 4, num_slices=num_slices),
        GemmConfig(False, 128, 128, 64, 3, 8, num_slices=num_slices),
    ):
        for num_rows in (1, 4, 33, len(x)):
            found = product(x[:num_rows].contiguous(), weight, config)
            if is_gpu:
                assert torch.equal(found, expected[:num_rows])
            else:  # the interpreter multiplies by BLAS, whose order of summation may depend on the shape
                assert_near(found, expected[:num_rows], inner=x.shape[1], magnitude=LARGEST)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_gated_multiply_is_near_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    num_rows, num_columns, inner = shape
    x, weight = inputs((num_rows, 2 * num_columns, inner), dtype, device)
    out = torch.full((num_rows, num_columns), torch.nan, dtype=dtype, device=device)
    gated_multiply(x, weight, out, GemmConfig(True, 32, 16, 64, 3, 4, num_slices=1))
    # On a GPU gate, its activation and up are rounded to the storage type, and then their product.
    num_roundings = 0 if dtype == torch.float32 else 4
    expected = gated_multiply_reference(x, weight)
    assert_near(out, expected, inner=inner, depth=2, magnitude=LARGEST, num_roundings=num_roundings)


def test_gated_multiply_takes_other_activations(device: str) -> None:
    x, weight = inputs((5, 40, 70), torch.float32, device)
    out = torch.full((5, 20), torch.nan, device=device)
    gated_multiply(x, weight, out, GemmConfig(True, 32, 16, 64, 3, 4), "gelu_tanh")
    expected = gated_multiply_reference(x, weight, "gelu_tanh")
    assert_near(out, expected, inner=70, depth=2, magnitude=LARGEST)


def test_errors_name_the_argument() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"out: \[1, 2, 5\] torch.float32: expected \[1, 2, 4\]"):
        multiply(x, weight, torch.zeros(1, 2, 5), GemmConfig())

    with pytest.raises(ValueError, match=r"x: \[2, 8\] torch.float32: expected \[2, 8\] torch.float16"):
        multiply(x, weight.half(), torch.zeros(1, 2, 4), GemmConfig())

    with pytest.raises(ValueError, match=r"x: strides \(16, 1\): expected a contiguous tensor"):
        multiply(torch.zeros(2, 16)[:, :8], weight, torch.zeros(1, 2, 4), GemmConfig())
