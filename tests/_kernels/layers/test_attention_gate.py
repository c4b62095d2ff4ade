from __future__ import annotations

import pytest
import torch
from references.layers import gate_attention_reference

from drift_sdk._kernels.layers.gates import gate_attention

pytestmark = pytest.mark.kernel

# The interpreter truncates to bfloat16 instead of rounding, so it tests float16 in its place.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(dtype).to(device)


def poisoned_part(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of `part` [..., R, W], and the larger tensor of NaN in which it lies: its columns are the
    last ones."""
    *slices, num_rows, size = part.shape
    wide = torch.full((*slices, num_rows + 2, size + 7), torch.nan, dtype=part.dtype, device=part.device)
    inner = wide[..., 1:-1, 7:]
    inner.copy_(part)
    return inner, wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 1536), (17, 101), (2, 1025), (1, 1), (0, 8)])
@pytest.mark.parametrize("num_slices", [0, 1, 3])
def test_output_is_near_the_reference(
    num_rows: int, size: int, num_slices: int, dtype: torch.dtype, device: str
) -> None:
    """num_slices: 0 for a gate in the storage type. Exponentials may differ in their last bit, so that a
    sigmoid may be rounded to a neighbour."""
    attended = random(num_rows, size, dtype=dtype, device=device, seed=1)
    if num_slices:
        gate = random(num_slices, num_rows, size, device=device, seed=2)
    else:
        gate = random(num_rows, size, dtype=dtype, device=device, seed=2)
    found, wide = poisoned_part(attended)
    gate_attention(found, poisoned_part(gate)[0])
    expected = gate_attention_reference(attended, gate)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=16 * torch.finfo(torch.float32).eps)
    total = gate.sum(0) if num_slices else gate
    exact = attended.double() * torch.sigmoid(total.double())
    # The gate is rounded, too: a sigmoid changes by at most that part of itself.
    bound = exact.abs() * (torch.finfo(dtype).eps * (total.double().abs() + 16)) + 1e-6
    assert ((found.double() - exact).abs() <= bound).all()
    found.fill_(torch.nan)
    assert wide.isnan().all()


def test_each_step_is_rounded(device: str) -> None:
    """The sum of the slices, the sigmoid, and the product. The second slice is less than half of the last
    place of the first."""
    attended = torch.linspace(1000, 2000, 64, device=device)[None].half()
    gate = torch.linspace(1, 4, 64, device=device)[None].half()
    partials = torch.stack((gate.float(), torch.full_like(gate, 4e-4).float()))
    expected = attended * torch.sigmoid(gate.double()).half()
    assert not torch.equal(expected, (attended.double() * torch.sigmoid(gate.double())).half())
    for each in (gate, partials):
        found = attended.clone()
        gate_attention(found, each)
        assert torch.equal(found, expected)


def test_slices_are_added_in_order(device: str) -> None:
    partials = torch.tensor([[[1.0]], [[2.0**-24]], [[2.0**-24]]], device=device)
    found = []
    for each in (partials, partials.flip(0), partials[:1], torch.tensor([[[1 + 2.0**-23]]], device=device)):
        found.append(torch.full((1, 1), 2.0**24, device=device))
        gate_attention(found[-1], each)
    assert found[0] == found[2] and found[1] == found[3]
    large = torch.tensor([[[1e8]], [[-1e8]], [[1.0]]], device=device)
    attended = torch.ones(2, 1, device=device)
    gate_attention(attended[:1], large)
    gate_attention(attended[1:], large.roll(1, 0))
    assert attended.tolist() == [[pytest.approx(0.7310586)], [0.5]]


def test_large_gates_do_not_overflow(device: str) -> None:
    attended = torch.full((1, 6), 2.0, device=device)
    gate_attention(attended, torch.tensor([[1e4, -1e4, -80.0, 0.0, torch.inf, -torch.inf]], device=device))
    assert attended.tolist() == [[2.0, 0.0, pytest.approx(2 * 1.8e-35, rel=0.01), 1.0, 2.0, 0.0]]


def test_rows_do_not_change_each_other(device: str) -> None:
    attended = random(3, 1100, device=device, seed=1)
    gate = random(2, 3, 1100, device=device, seed=2)
    attended[1], gate[:, 1] = torch.nan, torch.nan
    expected = attended.clone()
    gate_attention(attended, gate)
    for row in (0, 2):
        gate_attention(expected[row : row + 1], gate[:, row : row + 1])
        assert attended[row].isfinite().all() and torch.equal(attended[row], expected[row])


def test_errors_name_the_argument(device: str) -> None:
    attended = torch.zeros(2, 6, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"gate: \[2, 5\] torch.float16: expected \[2, 6\] torch.float16"):
        gate_attention(attended, attended[:, 1:])
    with pytest.raises(ValueError, match=r"gate: \[3, 2, 6\] torch.float16: expected .* torch.float32"):
        gate_attention(attended, torch.zeros(3, 2, 6, dtype=torch.float16, device=device))
    with pytest.raises(ValueError, match="attended: strides"):
        gate_attention(torch.zeros(6, 2, device=device).T, torch.zeros(2, 6, device=device))
