from __future__ import annotations

import pytest
import torch
from quantised_cases import FORMATS, QuantisedFormat, draw
from references.quantised import dequantise_reference

from drift_sdk._kernels.quantised.packing import dequantise, pack_weight

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", [(16, 64), (40, 576), (48, 200)], ids=str)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_a_packed_weight_has_the_numbers_it_was_made_of(
    kind: QuantisedFormat, shape: tuple[int, int], is_gated: bool, device: str
) -> None:
    if is_gated and shape[0] % 16:
        shape = (shape[0] + 8, shape[1])
    weight, numbers = draw(kind, *shape, device, is_gated=is_gated)
    # A product of two numbers of up to 11 bits is exact in float32, one with a float32 is rounded once.
    expected = numbers.to(torch.float32)
    assert torch.equal(dequantise_reference(weight), expected)
    # The interpreter truncates numbers that it rounds to bfloat16.
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        dequantise(weight, out)
        assert torch.equal(out, expected.to(dtype))


def test_groups_of_the_kernel_do_not_cross_slices() -> None:
    kind = FORMATS[3]
    assert draw(kind, 64, 1024, "cpu")[0].group_size == 128
    # Three slices of 192 columns; a group of 128 columns lies in two of them.
    weight, _ = draw(kind, 64, 576, "cpu")
    assert (weight.num_slices, weight.slice_size, weight.group_size) == (3, 192, 64)
    # One slice, whose last group has 64 columns.
    assert draw(kind, 64, 576, "cpu", is_whole=True)[0].group_size == 64


def test_all_numbers_of_e4m3_are_exact(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = codes.view(torch.float8_e4m3fn).to(torch.float32)
    codes = torch.where(values.isnan(), 0, codes).view(4, 64)
    weight = pack_weight(codes, torch.ones(4, 1, device=device), None, "e4m3", group_size=None)
    out = torch.full((4, 64), torch.nan, dtype=torch.bfloat16, device=device)
    dequantise(weight, out)
    assert torch.equal(out.flatten().float(), torch.where(values.isnan(), 0.0, values))


def test_errors_name_the_argument() -> None:
    codes, scales = torch.zeros(20, 64, dtype=torch.uint8), torch.ones(20, 1)
    with pytest.raises(ValueError, match="group_size=40: expected a multiple of 16"):
        pack_weight(codes, scales, None, "int4", group_size=40)
    with pytest.raises(ValueError, match=r"scales: \[20, 1\] torch.float32: expected \[20, 2\]"):
        pack_weight(codes, scales, None, "int4", group_size=32)
    with pytest.raises(ValueError, match="scales: torch.float64: expected float32, bfloat16 or float16"):
        pack_weight(codes, scales.double(), None, "int4", group_size=None)
    with pytest.raises(ValueError, match="zeros: given for e4m3: expected None"):
        pack_weight(codes, scales, scales, "e4m3", group_size=None)
    with pytest.raises(ValueError, match="zeros: given for a weight with offsets: expected None"):
        pack_weight(codes, scales, scales, "int4", group_size=None, offsets=scales)
    with pytest.raises(
        ValueError, match=r"offsets: \[20, 1\] torch.float16: expected \[20, 1\] torch.float32"
    ):
        pack_weight(codes, scales, None, "int8", group_size=None, offsets=scales.half())
    with pytest.raises(ValueError, match="20 rows of a gated weight: expected a multiple of 16"):
        pack_weight(codes, scales, None, "e4m3", group_size=None, is_gated=True)
