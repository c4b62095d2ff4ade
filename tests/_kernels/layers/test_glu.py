from __future__ import annotations

import pytest
import torch
from references.layers import glu_reference

from drift_sdk._kernels.layers.gates import glu
from drift_sdk.spec.model import Activation

pytestmark = pytest.mark.kernel

# The interpreter truncates to bfloat16 instead of rounding, so it tests float16 in its place.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 1536), (17, 100), (2, 1025), (1, 1)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_output_is_near_the_reference(
    num_rows: int, size: int, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    """Exponentials may differ in their last bit, so the gated value may be rounded to a neighbour."""
    gate_up = (torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    wide = torch.full((num_rows + 2, size + 5), torch.nan, dtype=dtype, device=device)
    output = wide[1:-1, :size]
    glu(gate_up.to(device), output, activation)
    tolerance = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2)
    # torch subtracts numbers near 1 where gelu is nearly 0.
    absolute = (16 if activation == "silu" else 128) * torch.finfo(torch.float32).eps
    expected = glu_reference(gate_up, activation)
    torch.testing.assert_close(output.cpu(), expected, rtol=tolerance, atol=absolute)
    assert wide[0].isnan().all() and wide[-1].isnan().all() and wide[:, size:].isnan().all()


def test_gated_values_are_rounded_before_the_product(device: str) -> None:
    gate, up = torch.linspace(1, 4, 64), torch.linspace(1000, 2000, 64)
    gate_up = torch.cat((gate, up))[None].to(torch.float16).to(device)
    output = torch.zeros(1, 64, dtype=torch.float16, device=device)
    glu(gate_up, output)
    silu = torch.nn.functional.silu(gate_up[:, :64].double())
    assert torch.equal(output, silu.to(torch.float16) * gate_up[:, 64:])
    assert not torch.equal(output, (silu * gate_up[:, 64:].double()).to(torch.float16))


def test_large_gates_do_not_overflow(device: str) -> None:
    gate_up = torch.tensor([[1e4, -80.0, 0.0, 2.0, 2.0, 2.0]], device=device)
    output = torch.zeros(1, 3, device=device)
    glu(gate_up, output)
    assert output.tolist() == [[2e4, pytest.approx(-160 * 1.8e-35, rel=0.01), 0.0]]
    gate_up = torch.tensor([[1e14, -1e14, -9.0, 2.0, 2.0, 2.0]], device=device)
    glu(gate_up, output, "gelu_tanh")
    assert output.tolist() == [pytest.approx([2e14, 0.0, 0.0], rel=1e-6, abs=1e-6)]


def test_errors_name_the_argument(device: str) -> None:
    with pytest.raises(ValueError, match=r"gate_up: \[2, 8\] torch.float32: expected \[2, 6\] torch.float32"):
        glu(torch.zeros(2, 8, device=device), torch.zeros(2, 3, device=device))
