"""Weights of e4m3 numbers: their values, blocks, rows, and quantisation."""

from __future__ import annotations

import pytest
import torch
from quantised_files import e4m3_table

from drift_sdk.quantised.formats import MAX_E4M3, Fp8Weight, join_fp8, quantise_fp8


def random_weight(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> Fp8Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, (rows, columns), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    shape = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.rand(shape, generator=generator) + 0.25
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scales, block)


def expected_numbers(weight: Fp8Weight) -> torch.Tensor:
    table = torch.from_numpy(e4m3_table())
    numbers = table[weight.values.view(torch.uint8).int()]
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            numbers[row, column] *= weight.scales[row // weight.block[0], column // weight.block[1]]
    return numbers


def test_all_codes() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    found = Fp8Weight(values, torch.ones(1, 1), (1, 256)).dequantise(torch.float32)[0]
    expected = torch.from_numpy(e4m3_table())
    is_nan = expected.isnan()
    assert is_nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))


@pytest.mark.parametrize("block", [(1, 50), (16, 16), (40, 50), (1, 16), (7, 50)])
def test_each_block_has_its_scale_and_the_last_may_be_cut_off(block: tuple[int, int]) -> None:
    weight = random_weight(40, 50, block)
    assert torch.equal(weight.dequantise(torch.float32), expected_numbers(weight))
    assert torch.equal(weight.dequantise(torch.bfloat16), expected_numbers(weight).bfloat16())
    index = torch.tensor([39, 3, 3, 17])
    assert torch.equal(weight.rows(index).dequantise(torch.float32), expected_numbers(weight)[index])


@pytest.mark.parametrize(
    ("index", "height"),
    [
        ((*range(16, 32), *range(16)), 16),
        ((*range(16), *range(32, 40)), 16),
        ((*range(8, 24), *range(8)), 1),
        ((*range(15), 16), 1),
        ((*range(8), *range(16, 32)), 1),
    ],
)
def test_blocks_of_which_all_rows_are_taken_stay(index: tuple[int, ...], height: int) -> None:
    weight, rows = random_weight(40, 50, (16, 16)), torch.tensor(index)
    taken = weight.rows(rows)
    assert taken.block == (height, 16)
    assert torch.equal(taken.dequantise(torch.float32), expected_numbers(weight)[rows])


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (1, 2)])
def test_scales_of_another_shape_are_rejected(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected \[2, 2\]"):
        Fp8Weight(torch.zeros((20, 20), dtype=torch.float8_e4m3fn), torch.ones(shape), (16, 16))


@pytest.mark.parametrize(
    "rows, heights",
    [
        ((32, 16, 16), (16, 16, 16)),
        ((9, 3, 5), (16, 16, 16)),
        ((24, 8, 8), (16, 8, 1)),
        ((5, 7, 20), (1, 1, 1)),
    ],
)
def test_joined_weights_have_the_same_numbers(rows: tuple[int, ...], heights: tuple[int, ...]) -> None:
    parts = [
        random_weight(size, 40, (height, 16), seed)
        for seed, (size, height) in enumerate(zip(rows, heights, strict=True))
    ]
    joined = join_fp8(parts)
    assert joined is not None and joined.shape == (sum(rows), 40)
    expected = torch.cat([part.dequantise(torch.float32) for part in parts])
    assert torch.equal(joined.dequantise(torch.float32), expected)


def test_blocks_of_other_widths_are_not_joined() -> None:
    assert join_fp8([random_weight(16, 32, (16, 16)), random_weight(16, 32, (16, 32))]) is None


def test_quantised_numbers_are_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn((12, 70), generator=generator)
    matrix[3] *= 1e-30
    matrix[4] *= 1e30
    matrix[5] = 0.0
    matrix[6] = 0.0
    matrix[6, 7] = -3e-45  # the smallest subnormal numbers
    weight = quantise_fp8(matrix)
    found = weight.dequantise(torch.float32)
    scales = weight.scales.double()
    finite = torch.from_numpy(e4m3_table()).double()
    finite = finite[finite.isfinite()]
    nearest = (matrix.double() / scales)[:, :, None].sub(finite).abs().amin(dim=2)
    error = (matrix.double() - found.double()).abs() / scales
    assert (error <= nearest + 1e-4).all()
    assert torch.equal(found[5], torch.zeros(70)) and weight.scales[5] == 1
    assert weight.values.float().abs().amax(dim=1)[[0, 1, 2, 3, 4]].eq(MAX_E4M3).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("block", [(16, 16), (7, 50), (40, 50), (64, 64)])
def test_blocks_are_quantised_like_rows(block: tuple[int, int]) -> None:
    """Each block as a row of its own would be, also one that is cut off or zero."""
    matrix = torch.randn(40, 50, generator=torch.Generator().manual_seed(3))
    matrix[:16, :16] = 0.0
    found = quantise_fp8(matrix, block)
    assert found.block == block
    for row, rows in enumerate(matrix.split(block[0])):
        for column, part in enumerate(rows.split(block[1], dim=1)):
            expected = quantise_fp8(part.reshape(1, -1))
            place = slice(row * block[0], None), slice(column * block[1], None)
            values = found.values.view(torch.uint8)[place][: part.shape[0], : part.shape[1]]
            assert torch.equal(values.reshape(1, -1), expected.values.view(torch.uint8))
            assert found.scales[row, column] == expected.scales[0, 0]
