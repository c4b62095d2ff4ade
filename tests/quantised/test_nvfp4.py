"""Weights of NVFP4: codes, scales of groups, global scales in both directions, and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantised_files import e2m1_table, e4m3_table

from drift_sdk.quantised import formats
from drift_sdk.quantised.formats import (
    NVFP4_GROUP,
    Nvfp4Weight,
    join_nvfp4,
    quantise_groups,
    quantise_nvfp4,
    stack_rows,
)
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
def test_numbers_are_those_of_the_definition(columns: int, is_divided: bool) -> None:
    weight, numbers = random_weight(5, columns, is_divided=is_divided)
    assert weight.shape == (5, columns)
    assert same_bits(weight.dequantise(torch.float32), numbers)
    assert same_bits(weight.dequantise(torch.bfloat16), numbers.bfloat16())
    index = torch.tensor([4, 4, 0])
    assert same_bits(weight.rows(index).dequantise(torch.float32), numbers[index])
    assert same_bits(weight.to(torch.device("cpu")).dequantise(torch.float32), numbers)
    assert weight.nbytes == 5 * (columns // 2 + -(-columns // 16) + 4)


@pytest.mark.parametrize("is_divided", [False, True])
def test_all_codes_and_scales_are_exact(is_divided: bool) -> None:
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


def quantised_one_by_one(x: np.ndarray, whole: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of numbers [n], by trying all codes."""
    steps, values = e4m3_table()[:0x7F], e2m1_table()[:8].astype(np.float64)
    bound = np.float32(6 * 448) * whole
    codes, scales = [], []
    for start in range(0, len(x), 16):
        group = x[start : start + 16]
        group = np.clip(np.where(np.isnan(group), np.float32(0), group), -bound, bound)
        found = []
        for largest in (6, 4):
            unit = np.abs(group).max() / whole / np.float32(largest)
            near = np.abs(steps.astype(np.float64) - np.float64(min(unit, 448)))
            scale = min((i for i in range(0x7F) if near[i] == near.min()), key=lambda i: i % 2)
            factor = steps[scale] * whole
            chosen = []
            for number in group:
                quotient = np.float64(np.float32(number) / factor) if factor else 0.0
                far = np.abs(values - abs(quotient))
                code = min((i for i in range(8) if far[i] == far.min()), key=lambda i: i % 2)
                chosen.append(code + 8 * int(np.signbit(number)))
            errors = (e2m1_table()[chosen] * factor - group) ** 2
            errors = np.pad(errors, (0, 16 - len(errors)))
            for half in (8, 4, 2, 1):
                errors = errors[:half] + errors[half:]
            found.append((errors[0], chosen, scale))
        _, chosen, scale = found[1] if found[1][0] < found[0][0] else found[0]
        codes += chosen
        scales.append(scale)
    return np.array(codes, np.uint8), np.array(scales, np.uint8)


@pytest.mark.parametrize("columns", [6, 16, 40])
def test_groups_are_quantised_as_defined(columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.normal(size=(24, columns)).astype(np.float32) * rng.uniform(0.01, 3, (24, 1)).astype(np.float32)
    whole = rng.uniform(0.001, 0.3, (24, 1)).astype(np.float32)
    x[1] = 0
    x[2, :2] = np.nan, 2
    x[3, 1:4] = np.inf, -np.inf, 5
    x[4] *= 1e-9  # every scale is 0
    x[5] = np.arange(columns) % 13 / 4  # between two codes
    whole[5] = 1
    codes, scales = quantise_groups(torch.from_numpy(x), torch.from_numpy(whole))
    for row in range(len(x)):
        expected, steps = quantised_one_by_one(x[row], whole[row, 0])
        found = torch.stack((codes[row] & 15, codes[row] >> 4), dim=1).flatten()
        assert found.tolist() == expected.tolist(), row
        assert scales[row].view(torch.uint8).tolist() == steps.tolist(), row
    again = quantise_groups(torch.from_numpy(x[7:8]), torch.from_numpy(whole[7:8]))
    assert torch.equal(again[0], codes[7:8]), "a row has the codes that it has beside others"


@pytest.mark.parametrize("columns", [128, 200])
def test_quantised_matrices_are_near(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn((8, columns), generator=torch.Generator().manual_seed(0))
    matrix[2] *= 1e-20
    matrix[3] = 0.0
    matrix[4, :20] = 0.0
    matrix[5] *= 1e-42  # subnormal
    weight = quantise_nvfp4(matrix)
    found = weight.dequantise(torch.float32)
    assert found.isfinite().all() and torch.equal(found[3:4], torch.zeros(1, columns))
    group = torch.arange(columns) // NVFP4_GROUP
    largest = torch.stack([matrix[:, group == i].abs().amax(dim=1) for i in group.unique()], dim=1)[:, group]
    # Half a step between 4 and 6, and the rounding of the scale.
    assert ((found - matrix).abs() <= largest * (1 / 6 + 1 / 16) + 1e-38).all()
    monkeypatch.setattr(formats, "QUANTISED_NUMBERS", 3 * columns)
    in_parts = quantise_nvfp4(matrix)
    for one, other in zip(in_parts.tensors(), weight.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    error = (found - matrix)[:2].square().mean() / matrix[:2].square().mean()
    assert 0.001 < error < 0.01
