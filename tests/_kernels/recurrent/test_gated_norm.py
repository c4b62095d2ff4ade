"""The norm of a recurrent layer's output, with its gate."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from references.recurrent import norm_gated_reference
from tolerances import assert_near

from drift_sdk._kernels.layers.norm import NormKind
from drift_sdk._kernels.recurrent.rows import norm_gated

pytestmark = pytest.mark.kernel

# The interpreter truncates to bfloat16 instead of rounding: that changes a rounding by less than one place.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = get_args(NormKind)
SHAPES = [(1, 1, 16), (3, 9, 48), (17, 4, 128), (2, 17, 1), (5, 3, 7), (0, 2, 16)]
"""Rows, heads and their size."""
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def poisoned_part(part: torch.Tensor) -> torch.Tensor:
    """A copy of `part` [..., R, W] as rows and last columns of a larger tensor of NaN."""
    *slices, num_rows, size = part.shape
    wide = torch.full((*slices, num_rows + 2, size + 7), torch.nan, dtype=part.dtype, device=part.device)
    inner = wide[..., 1:-1, 7:]
    inner.copy_(part)
    return inner


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_heads", "size"), SHAPES)
@pytest.mark.parametrize("num_slices", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_near_float64_and_the_reference(
    kind: NormKind, num_rows: int, num_heads: int, size: int, num_slices: int, dtype: torch.dtype, device: str
) -> None:
    """num_slices: 0 for a gate in the storage type. At most four steps are rounded: the gate, the normalised
    value, its product with the weight, and the output."""
    x = random(num_rows, num_heads * size, dtype=dtype, device=device, seed=1)
    weight = random(size, dtype=dtype, device=device, seed=2)
    slices = [num_slices] if num_slices else []
    gate = random(*slices, num_rows, num_heads * size, device=device, seed=3)
    gate = gate if num_slices else gate.to(dtype)
    wide = torch.full((num_rows + 2, num_heads * size), torch.nan, dtype=dtype, device=device)
    found = wide[1:-1]
    found.copy_(x)
    norm_gated(found, poisoned_part(gate), weight, eps=EPS, norm_kind=kind)
    inputs = [tensor.double() for tensor in (x, gate, weight)]
    exact = norm_gated_reference(*inputs, eps=EPS, norm_kind=kind)
    expected = norm_gated_reference(x, gate, weight, eps=EPS, norm_kind=kind)
    magnitude = exact.abs().max().item() if num_rows else 0.0
    roundings = 4 if dtype != torch.float32 else 0
    for each in (exact, expected):
        assert_near(found, each, inner=size, depth=3, magnitude=magnitude, num_roundings=roundings)
    found.fill_(torch.nan)
    assert wide.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_rounded_as_its_kind_says(kind: NormKind, device: str) -> None:
    """3 and 4 have the root mean square 3.5355; no step is near a tie."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float16, device=device)
    weight = torch.tensor([1001.0, 999.0], dtype=torch.float16, device=device)
    gate = torch.tensor([[[1.3], [0.7]], [[4e-4], [2e-4]]], device=device).view(2, 1, 2)
    gate[0] = gate[0].half().float()  # the second slice is less than half of a last place
    silu = torch.nn.functional.silu(gate[0])
    normed = x.double() / x.double().square().mean().sqrt()
    weighed = {
        "rounded": normed.half() * weight,
        "wide": (normed * weight.double()).half(),
        "offset": (normed * (1 + weight.double())).half(),
    }
    assert len({tuple(each.flatten().tolist()) for each in weighed.values()}) == 3
    found = x.clone()
    norm_gated(found, gate, weight, eps=1e-12, norm_kind=kind)
    assert torch.equal(found, (weighed[kind].double() * silu.double()).half())


def test_slices_are_added_in_order(device: str) -> None:
    large = torch.tensor([[[1e8]], [[-1e8]], [[1.0]]], device=device)
    x, weight = torch.ones(2, 1, device=device), torch.ones(1, device=device)
    norm_gated(x[:1], large, weight, eps=1e-12, norm_kind="wide")
    norm_gated(x[1:], large.roll(1, 0), weight, eps=1e-12, norm_kind="wide")
    assert x.tolist() == [[pytest.approx(0.7310586)], [0.0]]


# The interpreter warns of exponentials that overflow.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_large_gates_do_not_overflow(device: str) -> None:
    x, weight = torch.ones(1, 5, device=device), torch.ones(1, device=device)
    gate = torch.tensor([[1e4, -1e4, -80.0, 0.0, torch.inf]], device=device)
    norm_gated(x, gate, weight, eps=1e-12, norm_kind="rounded")
    assert x.tolist() == [[1e4, 0.0, pytest.approx(-80 * 1.8e-35, rel=0.01), 0.0, torch.inf]]


def test_rows_and_heads_do_not_change_each_other(device: str) -> None:
    """A row has the bits that it has alone, beside rows and heads of NaN."""
    x, gate = random(5, 11 * 48, device=device, seed=1), random(3, 5, 11 * 48, device=device, seed=2)
    weight = random(48, device=device, seed=3)
    x[2], gate[:, 3] = torch.nan, torch.nan
    x[1, 5 * 48] = torch.nan
    expected = x.clone()
    norm_gated(x, gate, weight, eps=EPS, norm_kind="offset")
    for row in range(5):
        norm_gated(expected[row : row + 1], gate[:, row : row + 1], weight, eps=EPS, norm_kind="offset")
    assert torch.equal(x.nan_to_num(9.0), expected.nan_to_num(9.0))
    is_nan = x.isnan().view(5, 11, 48)
    assert is_nan[2:4].all() and is_nan[1, 5].all() and is_nan.sum() == (2 * 11 + 1) * 48


def test_errors_name_the_argument(device: str) -> None:
    x, weight = torch.zeros(2, 6, device=device), torch.zeros(3, device=device)

    def norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> None:
        norm_gated(x, gate, weight, eps=EPS, norm_kind="rounded")

    with pytest.raises(ValueError, match=r"gate: \[2, 5\] torch.float32: expected \[2, 6\] torch.float32"):
        norm(x, x[:, 1:], weight)
    with pytest.raises(ValueError, match=r"gate: \[3, 2, 6\] torch.float16: expected .* torch.float32"):
        norm(x.half(), torch.zeros(3, 2, 6, device=device).half(), weight.half())
    with pytest.raises(ValueError, match="gate: strides"):
        norm(x, torch.zeros(6, 2, device=device).T, weight)
    with pytest.raises(ValueError, match=r"weight: \[3\] torch.float16: expected \[3\] torch.float32"):
        norm(x, x, weight.half())
    with pytest.raises(ValueError, match="weight: strides"):
        norm(x, x, torch.zeros(6, device=device)[::2])
    with pytest.raises(ValueError, match="x: strides"):
        norm(torch.zeros(2, 7, device=device)[:, 1:], x, weight)
    with pytest.raises(ValueError, match=r"x: \[2, 6\] torch.float32: expected \[2, 4\]"):
        norm(x, x, torch.zeros(4, device=device))
