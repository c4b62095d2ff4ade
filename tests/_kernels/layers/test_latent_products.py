"""Products with a matrix of each head."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_near

from drift_sdk._kernels.layers.latent_rows import multiply_heads

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("steady_dots")]

IS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if IS_GPU else (torch.float32,)
SHAPES = [(3, 24, 12), (1, 70, 130), (5, 64, 64)]
"""Heads, columns and inner indices."""


def product(
    shape: tuple[int, int, int], num_rows: int, dtype: torch.dtype, device: str, *, is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, matrices, the product in wider heads of NaN, and the product in float64."""
    num_heads, num_columns, inner = shape
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(num_rows, num_heads, inner, generator=generator).to(device, dtype)
    sizes = (inner, num_columns) if is_transposed else (num_columns, inner)
    weight = torch.randn(num_heads, *sizes, generator=generator).to(device, dtype)
    weight = weight.transpose(1, 2) if is_transposed else weight
    out = torch.full((num_rows, num_heads, num_columns + 5), torch.nan, dtype=dtype, device=device)
    multiply_heads(x, weight, out[..., :num_columns])
    assert out[..., num_columns:].isnan().all()
    return x, weight, out[..., :num_columns], torch.einsum("mhk,hnk->mhn", x.double(), weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 17, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_near_float64(
    shape: tuple[int, int, int], num_rows: int, is_transposed: bool, dtype: torch.dtype, device: str
) -> None:
    *_, found, expected = product(shape, num_rows, dtype, device, is_transposed=is_transposed)
    assert_near(found, expected, inner=shape[2], num_roundings=dtype != torch.float32)


def test_bits_do_not_depend_on_the_number_of_rows(device: str) -> None:
    x, weight, found, _ = product((3, 24, 130), 70, DTYPES[-1], device, is_transposed=True)
    for rows in (slice(0, 1), slice(5, 9), slice(60, 70), slice(1, 66)):
        part = torch.empty_like(found[rows]).contiguous()
        multiply_heads(x[rows].contiguous(), weight, part)
        assert torch.equal(part, found[rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize(("num_columns", "inner"), [(512, 192), (256, 512), (512, 128), (128, 512)])
def test_published_shapes_have_one_set_of_bits(num_columns: int, inner: int, device: str) -> None:
    is_transposed = num_columns == 512
    x, weight, found, expected = product(
        (20, num_columns, inner), 600, torch.bfloat16, device, is_transposed=is_transposed
    )
    assert_near(found, expected, inner=inner, num_roundings=1)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 140)):
        part = torch.empty_like(found[rows]).contiguous()
        multiply_heads(x[rows].contiguous(), weight, part)
        assert torch.equal(part, found[rows]), rows


def test_wrong_arguments_are_refused(device: str) -> None:
    x, weight = torch.zeros(2, 3, 8, device=device), torch.zeros(3, 5, 8, device=device)
    with pytest.raises(ValueError, match="expected .2, 3, 5. torch.float32, the beginnings of heads"):
        multiply_heads(x, weight, torch.zeros(2, 5, 3, device=device).transpose(1, 2))
    with pytest.raises(ValueError, match="weight: .4, 5, 8.: expected .3, 5, 8."):
        multiply_heads(x, torch.zeros(4, 5, 8, device=device), torch.zeros(2, 3, 5, device=device))
