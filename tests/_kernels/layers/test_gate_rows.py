from __future__ import annotations

import pytest
import torch
from references.layers import gate_rows_reference

from drift_sdk._kernels.layers.gates import gate_rows

pytestmark = pytest.mark.kernel

# The interpreter truncates to bfloat16 instead of rounding, so it tests float16 in its place.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


def drawn(num_rows: int, size: int, num_columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, weight and activated. Sums of x times weight are exact in any order, and from about -4 to 4."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-2, 3, (num_rows, size), generator=generator) / 8
    weight = torch.randint(-2, 3, (size,), generator=generator) / 8
    return x.to(dtype), weight.to(dtype), torch.randn(num_rows, num_columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "size", "num_columns"),
    [(1, 64, 32), (3, 1536, 512), (17, 100, 300), (2, 2049, 4100), (2, 1, 1)],
)
def test_rows_are_near_the_reference(
    num_rows: int, size: int, num_columns: int, dtype: torch.dtype, device: str
) -> None:
    """Exponentials may differ in their last bit, so the factor may be rounded to a neighbour."""
    x, weight, activated = drawn(num_rows, size, num_columns, dtype)
    wide_x = torch.full((num_rows, size + 3), torch.nan, dtype=dtype, device=device)
    wide_x[:, :size] = x
    wide = torch.full((num_rows + 2, num_columns + 5), torch.nan, dtype=dtype, device=device)
    found = wide[1:-1, :num_columns]
    found.copy_(activated)
    gate_rows(wide_x[:, :size], weight.to(device), found)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2)
    expected = gate_rows_reference(x, weight, activated)
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=0)
    assert wide[0].isnan().all() and wide[-1].isnan().all() and wide[:, num_columns:].isnan().all()


def test_product_has_the_values_of_a_gate_behind_it(device: str) -> None:
    x, weight, activated = drawn(5, 96, 40, torch.float32)
    down = torch.randn(24, 40, generator=torch.Generator().manual_seed(2))
    expected = (x @ weight).sigmoid()[:, None] * (activated @ down.T)
    found = activated.to(device, copy=True)
    gate_rows(x.to(device), weight.to(device), found)
    torch.testing.assert_close(found.cpu() @ down.T, expected, rtol=1e-5, atol=1e-5)


def test_logit_and_factor_are_rounded(device: str) -> None:
    """Logits from -4 to -5 lie between numbers of float16, which are 2^-8 apart there."""
    coarse = -(4 + torch.arange(64) / 64)
    x = torch.stack((coarse, torch.full((64,), -(2.0**-9)))).T.contiguous().to(torch.float16)
    weight = torch.tensor([1.0, 0.9375], dtype=torch.float16)
    activated = torch.linspace(1, 2, 64 * 8).view(64, 8).to(torch.float16)
    found = activated.to(device, copy=True)
    gate_rows(x.to(device), weight.to(device), found)
    logit = (x.double() @ weight.double())[:, None]
    factor = logit.to(torch.float16).double().sigmoid()
    assert torch.equal(found.cpu(), factor.to(torch.float16) * activated)
    assert not torch.equal(found.cpu(), (factor * activated.double()).to(torch.float16))
    assert not torch.equal(found.cpu(), logit.sigmoid().to(torch.float16) * activated)


def test_row_has_the_bits_that_it_has_alone(device: str) -> None:
    x, weight, activated = (tensor.to(device) for tensor in drawn(9, 200, 70, torch.float32))
    x += 1 / 3
    together = activated.clone()
    gate_rows(x, weight, together)
    for row in range(9):
        alone = activated[row : row + 1].clone()
        gate_rows(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], together[row])


def test_errors_name_the_argument(device: str) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match=r"weight: \[1, 8\] torch.float32: expected \[8\] torch.float32"):
        gate_rows(x, weight[None], torch.zeros(2, 3, device=device))
    with pytest.raises(ValueError, match=r"activated: \[3, 3\] torch.float32: expected \[2, 3\]"):
        gate_rows(x, weight, torch.zeros(3, 3, device=device))
