"""Decays and rates of the gated delta rule."""

from __future__ import annotations

import pytest
import torch
from references.recurrent import fill_gates_reference
from tolerances import assert_near

from drift_sdk._kernels.recurrent.rows import fill_gates

pytestmark = pytest.mark.kernel

# The interpreter truncates to bfloat16 instead of rounding: that changes a rounding by less than one place.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (1, 48), (3, 33), (17, 6), (9, 32), (0, 4)]


def eighths(*shape: int, most: int = 24, device: str, seed: int) -> torch.Tensor:
    """Multiples of 1/8, of which sums are exact in each type."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-most, most + 1, shape, generator=generator) / 8).to(device)


def drawn(num_heads: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays, up to 16 as in the models, and steps."""
    decay = torch.linspace(-3, 2.77, num_heads, device=device)
    return decay, eighths(num_heads, device=device, seed=9).to(dtype)


def poisoned_part(part: torch.Tensor) -> torch.Tensor:
    """A copy of `part` [..., R, W] in a larger tensor of NaN."""
    *slices, num_rows, size = part.shape
    wide = torch.full((*slices, num_rows + 3, size + 5), torch.nan, dtype=part.dtype, device=part.device)
    inner = wide[..., 2:-1, 5:]
    inner.copy_(part)
    return inner


def poisoned_gates(num_rows: int, num_heads: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates, and the larger tensor of NaN that they are rows of."""
    wide = torch.full((num_rows + 2, 2 * num_heads), torch.nan, device=device)
    return wide[1:-1], wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_heads"), SHAPES)
@pytest.mark.parametrize("num_slices", [0, 1, 3])
def test_gates_are_near_float64(
    num_rows: int, num_heads: int, num_slices: int, dtype: torch.dtype, device: str
) -> None:
    """num_slices: 0 for a product in the storage type."""
    slices = [num_slices] if num_slices else []
    product = eighths(*slices, num_rows, 2 * num_heads, device=device, seed=1)
    product = product if num_slices else product.to(dtype)
    decay, step = drawn(num_heads, dtype, device)
    gates, wide = poisoned_gates(num_rows, num_heads, device)
    fill_gates(poisoned_part(product), decay, step, gates)
    expected = fill_gates_reference(product.double(), decay.double(), step.double())
    decays, rates = gates.chunk(2, dim=1)
    exact_decays, exact_rates = expected.chunk(2, dim=1)
    assert_near(decays, exact_decays, inner=1, depth=2, name="decays")
    assert torch.equal(rates, rates.to(dtype).float())
    assert_near(rates.to(dtype), exact_rates, inner=1, num_roundings=1, name="rates")
    assert (decays <= 0).all() and (rates >= 0).all() and (rates <= 1).all()
    gates.fill_(torch.nan)
    assert wide.isnan().all()


def test_each_step_is_rounded(device: str) -> None:
    """The sum of the slices, and the sigmoid. The second slice is less than half of the last place of the
    first."""
    coarse = torch.linspace(1, 4, 32, device=device).half()
    product = torch.stack((coarse.float(), torch.full_like(coarse, 4e-4).float()))[:, None]
    decay, step = torch.zeros(16, device=device), torch.full((16,), 0.1, device=device).half()
    expected = fill_gates_reference(coarse[None], decay, step)
    assert torch.equal(expected[0, 16:], coarse[:16].double().sigmoid().half().float())
    for each in (coarse[None], product):
        gates = torch.full((1, 32), torch.nan, device=device)
        fill_gates(each, decay, step, gates)
        assert torch.equal(gates[:, 16:], expected[:, 16:])
        assert_near(gates[:, :16], expected[:, :16], inner=1, name="decays")
    unrounded = (coarse[:16].double() + 4e-4 + step.double()).exp().log1p() / torch.tensor(2.0).double().log()
    assert (gates[0, :16].double() + unrounded).abs().min() > 1e-4


def test_slices_are_added_in_order(device: str) -> None:
    large = torch.tensor([1e8, -1e8, 1.0], device=device)
    product = torch.stack((large, large.roll(1)), dim=1)[:, None]  # [slices, row, b and a]
    gates = torch.full((2, 2), torch.nan, device=device)
    zero = torch.zeros(1, device=device)
    fill_gates(product, zero, zero, gates[:1])
    fill_gates(product.flip(2), zero, zero, gates[1:])
    one, half = torch.tensor(1.0).sigmoid().item(), 0.5
    assert gates[:, 1].tolist() == [pytest.approx(one), half]
    softplus = [-1.0, pytest.approx(-torch.tensor(1.0).exp().log1p().item() / 0.6931471805599453)]
    assert gates[:, 0].tolist() == softplus


# The interpreter warns of exponentials that overflow.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_large_products_do_not_overflow(device: str) -> None:
    values = torch.tensor([1e4, -1e4, 90.0, -90.0, torch.inf, -torch.inf], device=device)
    gates = torch.full((1, 12), torch.nan, device=device)
    zeros = torch.zeros(6, device=device)
    fill_gates(torch.cat((values, values.roll(1)))[None], zeros, zeros, gates)
    assert gates[0, 6:].tolist() == [1.0, 0.0, 1.0, pytest.approx(0.0, abs=1e-38), 1.0, 0.0]
    decays = (-gates[0, :6] * 0.6931471805599453).tolist()
    assert decays == [0.0, pytest.approx(1e4), 0.0, pytest.approx(90.0), 0.0, torch.inf]


def test_row_has_the_bits_that_it_has_alone(device: str) -> None:
    product = torch.randn(3, 9, 66, generator=torch.Generator().manual_seed(1)).to(device)
    product[:, 4] = torch.nan
    decay, step = drawn(33, torch.float32, device)
    together, alone = (torch.full((9, 66), torch.nan, device=device) for _ in range(2))
    fill_gates(product, decay, step, together)
    for row in (*range(4), *range(5, 9)):
        fill_gates(product[:, row : row + 1], decay, step, alone[row : row + 1])
        assert together[row].isfinite().all() and torch.equal(together[row], alone[row])


def test_errors_name_the_argument(device: str) -> None:
    product, gates = torch.zeros(2, 6, device=device), torch.zeros(2, 6, device=device)
    decay = step = torch.zeros(3, device=device)
    with pytest.raises(ValueError, match=r"product: \[2, 5\] torch.float32: expected \[2, 6\] torch.float32"):
        fill_gates(product[:, 1:], decay, step, gates)
    with pytest.raises(ValueError, match=r"product: \[3, 2, 6\] torch.float16: expected .* torch.float32"):
        fill_gates(torch.zeros(3, 2, 6, device=device).half(), decay, step.half(), gates)
    with pytest.raises(ValueError, match=r"product: \[2, 6\] torch.float32: expected \[2, 6\] torch.float16"):
        fill_gates(product, decay, step.half(), gates)
    with pytest.raises(ValueError, match="product: strides"):
        fill_gates(torch.zeros(6, 2, device=device).T, decay, step, gates)
    with pytest.raises(ValueError, match=r"decay: \[2\] torch.float32: expected \[3\] torch.float32"):
        fill_gates(product, decay[1:], step, gates)
    with pytest.raises(ValueError, match=r"decay: \[3\] torch.float16: expected \[3\] torch.float32"):
        fill_gates(product.half(), decay.half(), step.half(), gates)
    with pytest.raises(ValueError, match="step: strides"):
        fill_gates(product, decay, torch.zeros(6, device=device)[::2], gates)
    with pytest.raises(ValueError, match=r"gates: \[2, 5\] torch.float32: expected \[2, 6\]"):
        fill_gates(product, decay, step, gates[:, 1:])
    with pytest.raises(ValueError, match="gates: strides"):
        fill_gates(product, decay, step, torch.zeros(2, 7, device=device)[:, 1:])
    with pytest.raises(ValueError, match=r"gates: \[2, 6\] torch.float16"):
        fill_gates(product, decay, step, gates.half())
