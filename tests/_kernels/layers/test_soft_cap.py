from __future__ import annotations

import math

import pytest
import torch
from references.layers import soft_cap_reference

from drift_sdk._kernels.layers.soft_cap import soft_cap

pytestmark = pytest.mark.kernel

CAP = 30.0
TOLERANCE = 2e-7
"""Of a result, as a part of the cap."""


def poisoned_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of logits on their device, and the larger tensor of NaN in which it lies."""
    num_rows, size = logits.shape
    wide = torch.full((num_rows + 2, size + 5), torch.nan, device=logits.device)
    inner = wide[1:-1, 2 : size + 2]
    inner.copy_(logits)
    return inner, wide


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 1025), (17, 77), (1, 1), (1, 262_144), (0, 5)])
@pytest.mark.parametrize("cap", [CAP, 0.3, 50])
def test_logits_are_near_the_reference(num_rows: int, size: int, cap: float, device: str) -> None:
    logits = (torch.randn(num_rows, size, generator=torch.Generator().manual_seed(1)) * 2 * cap).to(device)
    found, wide = poisoned_rows(logits)
    soft_cap(found, cap)
    expected = soft_cap_reference(logits.double(), cap)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE * cap)
    wide[1:-1, 2 : size + 2] = torch.nan
    assert wide.isnan().all()


def test_the_reference_in_float32_is_near(device: str) -> None:
    logits = torch.linspace(-200, 200, 5001, device=device)[None]
    expected = soft_cap_reference(logits, CAP)
    soft_cap(logits, CAP)
    torch.testing.assert_close(logits, expected, rtol=0, atol=4e-7 * CAP)


def magnitudes(device: str) -> torch.Tensor:
    """Ascending float32 numbers: every 2^12th one, and each near the borders of formulas and exponents."""
    bits = [torch.arange(0, 0x7F80_0000, 2**12, dtype=torch.int32)]
    halves = [(n + 0.5) * math.log(2) / 2 for n in range(28)]
    for border in (2.0**-13, 0.25, 9.0109, 10.0, *halves):
        middle = int(torch.tensor(border, dtype=torch.float32).view(torch.int32))
        bits.append(torch.arange(middle - 500, middle + 500, dtype=torch.int32))
    return torch.cat(bits).unique().view(torch.float32).to(device)


def test_tanh_never_falls_and_is_odd(device: str) -> None:
    """With a cap of 1."""
    positive = magnitudes(device)
    logits = torch.stack((positive, -positive))
    soft_cap(logits, 1.0)
    assert torch.equal(logits[0], -logits[1])
    assert (logits[0].diff() >= 0).all() and logits[0, -1] == 1.0
    assert torch.equal(logits.signbit(), torch.tensor([[False], [True]], device=device).expand_as(logits))
    assert (logits[0, 1:] > 0).all()
    exact = positive.double().tanh()
    torch.testing.assert_close(logits[0].double(), exact, rtol=4e-7, atol=0)
    assert (logits[0].double() - exact).abs().max() < 1.2e-7
    is_small = positive < 2.0**-13
    assert torch.equal(logits[0, is_small], positive[is_small])


def test_no_number_of_an_octave_is_before_a_smaller_one(device: str) -> None:
    """All float32 numbers on both sides of the border between the formulas."""
    middle = int(torch.tensor(0.25).view(torch.int32))
    logits = torch.arange(middle - 2**19, middle + 2**19, dtype=torch.int32).view(1, -1)
    logits = logits.view(torch.float32).to(device)
    soft_cap(logits, 1.0)
    assert (logits.diff() >= 0).all()


def test_limits_and_nan(device: str) -> None:
    logits = torch.tensor([[math.inf, -math.inf, math.nan, 3e38, -3e38, 0.0, -0.0, 1e-44]], device=device)
    soft_cap(logits, CAP)
    assert logits[0, [0, 1, 3, 4]].tolist() == [CAP, -CAP, CAP, -CAP]
    assert logits[0].isnan().tolist() == [index == 2 for index in range(8)]
    assert logits[0, 5:7].tolist() == [0.0, 0.0] and logits[0, 5:7].signbit().tolist() == [False, True]
    assert logits[0, 7] >= 0.0


def tanh_by_operations(x: torch.Tensor) -> torch.Tensor:
    """The formula of the kernel, each operation by itself in float32 on the CPU."""
    a = x.abs().clamp(max=10.0)
    square = a * a
    series = (square * (62 / 2835) - 17 / 315) * square + 2 / 15
    low = a + a * square * (series * square - 1 / 3)
    binary = 2.0 * a * 1.4426950408889634
    exponent = (binary + 0.5).floor()
    g = (binary - exponent) * 0.6931471805599453
    power = torch.full_like(g, 1 / 5040)
    for order in range(6, -1, -1):
        power = power * g + 1 / math.factorial(order)
    high = 1.0 - 2.0 / (power * exponent.exp2() + 1.0)
    return torch.copysign(torch.where(a < 0.25, low, high), x)


def test_bits_are_those_of_the_same_operations_on_any_device(device: str) -> None:
    logits = torch.linspace(-310, 310, 20_001)[None]
    found = logits.clone().to(device)
    soft_cap(found, CAP)
    assert torch.equal(found.cpu(), CAP * tanh_by_operations(logits / CAP))


def test_rows_do_not_change_each_other(device: str) -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1)).to(device) * 40
    logits[1] = torch.nan
    expected = logits.clone()
    soft_cap(logits, CAP)
    for row in (0, 2):
        alone = expected[row : row + 1]
        soft_cap(alone, CAP)
        assert torch.equal(logits[row], alone[0])
    assert logits[1].isnan().all()


def test_errors_name_the_argument(device: str) -> None:
    logits = torch.zeros(2, 6, device=device)
    with pytest.raises(ValueError, match=r"logits: \[2, 6\] torch.float16: expected \[2, 6\] torch.float32"):
        soft_cap(logits.half(), CAP)
    with pytest.raises(ValueError, match="logits: strides"):
        soft_cap(torch.zeros(6, 2, device=device).T, CAP)
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"cap={cap}: expected a positive finite number"):
            soft_cap(logits, cap)
