"""Weights of 4-bit codes: order of codes, groups, zero points, rows, and quantisation."""

from __future__ import annotations

import pytest
import torch

from drift_sdk.quantised.formats import QUANTISED_GROUP, Int4Weight, join_int4, pack_codes, quantise_int4


def random_weight(
    rows: int, columns: int, group_size: int, *, has_zeros: bool = True, dtype=torch.float16, seed: int = 0
) -> tuple[Int4Weight, torch.Tensor]:
    """A weight and its numbers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    shape = rows, -(-columns // group_size)
    scales = (torch.rand(shape, generator=generator) / 16 + 0.01).to(dtype)
    zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8) if has_zeros else None
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    numbers = torch.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            group = column // group_size
            zero = 8 if zeros is None else int(zeros[row, group])
            numbers[row, column] = float(codes[row, column] - zero) * float(scales[row, group])
            if column % 2 == 0:
                packed[row, column // 2] = codes[row, column] + 16 * codes[row, column + 1]
    return Int4Weight(packed, scales, zeros, group_size), numbers


@pytest.mark.parametrize("group_size", [16, 32, 40, 64])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers(group_size: int, has_zeros: bool, dtype: torch.dtype) -> None:
    weight, numbers = random_weight(6, 40, group_size, has_zeros=has_zeros, dtype=dtype)
    assert torch.equal(weight.dequantise(torch.float32), numbers)
    assert torch.equal(weight.dequantise(torch.bfloat16), numbers.bfloat16())
    index = torch.tensor([5, 5, 0])
    assert torch.equal(weight.rows(index).dequantise(torch.float32), numbers[index])


def test_codes_are_packed_as_they_are_read() -> None:
    weight, _ = random_weight(4, 12, 12)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=2).flatten(1)
    assert torch.equal(pack_codes(codes), weight.codes)


@pytest.mark.parametrize("field", ["scales", "zeros"])
def test_groups_that_do_not_fit_are_rejected(field: str) -> None:
    tensors = {"scales": torch.ones(4, 2), "zeros": torch.zeros((4, 2), dtype=torch.uint8)}
    tensors[field] = tensors[field][:, :1]
    with pytest.raises(ValueError, match=rf"{field} of shape \[4, 1\]: expected \[4, 2\]"):
        Int4Weight(torch.zeros((4, 10), dtype=torch.uint8), group_size=16, **tensors)


def test_joined_weights_have_the_same_numbers() -> None:
    parts = [
        random_weight(3, 24, 16, has_zeros=False, seed=1),
        random_weight(2, 24, 16, has_zeros=True, dtype=torch.bfloat16, seed=2),
    ]
    joined = join_int4([weight for weight, _ in parts])
    assert joined is not None and joined.zeros is not None
    assert torch.equal(joined.dequantise(torch.float32), torch.cat([numbers for _, numbers in parts]))
    symmetric = join_int4([parts[0][0], parts[0][0]])
    assert symmetric is not None and symmetric.zeros is None
    assert symmetric.scales.dtype == torch.float16
    assert join_int4([parts[0][0], random_weight(2, 24, 12)[0]]) is None


@pytest.mark.parametrize("columns", [QUANTISED_GROUP, 3 * QUANTISED_GROUP + 10])
def test_quantised_numbers_are_the_nearest(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn((8, columns), generator=generator)
    matrix[2] *= 1e-20
    matrix[3] = 0.0
    matrix[4, :20] = 0.0
    weight = quantise_int4(matrix)
    found = weight.dequantise(torch.float32)
    group = torch.arange(columns) // QUANTISED_GROUP
    scales = weight.scales.double()[:, group]
    grid = torch.arange(-8, 8).double()
    nearest = (matrix.double() / scales)[:, :, None].sub(grid).abs().amin(dim=2)
    error = (matrix.double() - found.double()).abs() / scales.abs()
    assert (error <= nearest + 1e-5).all()
    # The extreme number of a group is off by the rounding of the scale alone.
    first = matrix[:, :QUANTISED_GROUP]
    place = first.abs().argmax(dim=1, keepdim=True)
    extreme, stored = first.gather(1, place), found.gather(1, place)
    assert ((stored - extreme).abs() <= 2**-8 * extreme.abs()).all()
    assert torch.equal(found[3], torch.zeros(columns))
