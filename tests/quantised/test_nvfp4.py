"""Weights of NVFP4: codes, scales of groups, global scales in both directions, and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantised_files import e2m1_table, e4m3_table

from drift_sdk.quantised.nvfp4 import NVFP4_GROUP, Nvfp4Weight, join_nvfp4
from drift_sdk.quantised.stacking import stack_rows
from drift_sdk.quantised.weight import StackedWeight


def random_weight(
    rows: int, columns: int, *, is_divided: bool, seed: int = 0
) -> tuple[Nvfp4Weight, torch.Tensor]:
    """A weight of any codes and scales, and its numbers, computed one by one in numpy."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    groups = -(-columns // NVFP4_GROUP)
    scales = rng.integers(0, 0x7F, (rows, groups), dtype=np.uint8)
    whole = rng.uniform(0.01, 300, rows).astype(np.float32)
    numbers = np.empty((rows, columns), np.float32)
    values, steps = e2m1_table(), e4m3_table()
    for row in range(rows):
        for column in range(columns):
            scale = steps[scales[row, column // 16]]
            factor = scale / whole[row] if is_divided else scale * whole[row]
            numbers[row, column] = values[codes[row, column]] * factor
    packed = np.empty((rows, columns // 2), np.uint8)
    for column in range(columns // 2):
        packed[:, column] = codes[:, 2 * column] + 16 * codes[:, 2 * column + 1]
    weight = Nvfp4Weight(
        torch.from_numpy(packed),
        torch.from_numpy(scales).view(torch.float8_e4m3fn),
        torch.from_numpy(whole),
        is_divided,
    )
    return weight, torch.from_numpy(numbers)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    dtype = {4: torch.int32, 2: torch.int16}[expected.itemsize]
    return torch.equal(found.view(dtype), expected.view(dtype))


@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize("columns", [2, 14, 16, 40, 96])
def test_numbers(columns: int, is_divided: bool) -> None:
    weight, numbers = random_weight(5, columns, is_divided=is_divided)
    assert weight.shape == (5, columns)
    assert same_bits(weight.dequantise(torch.float32), numbers)
    assert same_bits(weight.dequantise(torch.bfloat16), numbers.bfloat16())
    index = torch.tensor([4, 4, 0])
    assert same_bits(weight.rows(index).dequantise(torch.float32), numbers[index])
    assert same_bits(weight.to(torch.device("cpu")).dequantise(torch.float32), numbers)
    assert weight.nbytes == 5 * (columns // 2 + -(-columns // 16) + 4)


@pytest.mark.parametrize("is_divided", [False, True])
def test_all_codes_and_scales(is_divided: bool) -> None:
    """One row for each scale but NaN, with all bytes of codes."""
    scales = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    rows = len(scales)
    codes = torch.arange(256, dtype=torch.uint8).expand(rows, 256).contiguous()
    whole = np.float32(0.0123)
    factors = e4m3_table()[scales] / whole if is_divided else e4m3_table()[scales] * whole
    pairs = np.stack((e2m1_table()[np.arange(256) & 15], e2m1_table()[np.arange(256) >> 4]), axis=1)
    expected = torch.from_numpy(pairs.reshape(1, 512) * factors[:, None])
    of_groups = torch.from_numpy(scales).view(torch.float8_e4m3fn)[:, None].expand(rows, 32).contiguous()
    weight = Nvfp4Weight(codes, of_groups, torch.full((rows,), float(whole)), is_divided)
    assert same_bits(weight.dequantise(torch.float32), expected)


@pytest.mark.parametrize("field", ["scales", "global_scales"])
def test_scales_that_do_not_fit_are_rejected(field: str) -> None:
    tensors = {"scales": torch.ones(4, 2).to(torch.float8_e4m3fn), "global_scales": torch.ones(4)}
    tensors[field] = tensors[field][:3]
    with pytest.raises(ValueError, match=rf"{field} of shape \[3.*: expected \[4"):
        Nvfp4Weight(torch.zeros((4, 10), dtype=torch.uint8), is_divided=True, **tensors)


def test_joined_weights_have_the_same_numbers() -> None:
    parts = [random_weight(rows, 24, is_divided=True, seed=rows) for rows in (3, 2)]
    joined = join_nvfp4([weight for weight, _ in parts])
    assert joined is not None
    assert same_bits(joined.dequantise(torch.float32), torch.cat([numbers for _, numbers in parts]))
    assert type(stack_rows([weight for weight, _ in parts])) is Nvfp4Weight
    multiplied, numbers = random_weight(2, 24, is_divided=False)
    stacked = stack_rows([parts[0][0], multiplied])
    assert type(stacked) is StackedWeight
    assert same_bits(stacked.dequantise(torch.float32), torch.cat((parts[0][1], numbers)))
