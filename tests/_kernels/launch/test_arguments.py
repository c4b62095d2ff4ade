from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.launch.arguments import (
    PartialSums,
    check_partial_sums,
    check_power_of_two,
    check_range,
    check_rows,
    check_tensor,
    check_tensors,
)

FP32, FP16 = torch.float32, torch.float16


def test_shapes_and_types_are_checked() -> None:
    tensor = torch.zeros(2, 3)
    check_tensor("x", tensor, (2, 3), FP32)
    with pytest.raises(ValueError, match=r"x: \[2, 3\] torch.float32: expected \[2, 4\] torch.float32"):
        check_rows("x", tensor, (2, 4), FP32)
    with pytest.raises(ValueError, match=r"x: \[2, 3\] torch.float32: expected \[2, 3\] torch.float16"):
        check_tensor("x", tensor, (2, 3), FP16)


def test_rows_may_have_any_stride_where_only_rows_are_checked() -> None:
    rows = torch.zeros(4, 8)[::2, :3]
    check_rows("x", rows, (2, 3), FP32)
    with pytest.raises(ValueError, match=r"x: strides \(16, 1\): expected a contiguous tensor"):
        check_tensor("x", rows, (2, 3), FP32)
    with pytest.raises(ValueError, match=r"x: strides \(1, 3\): expected 1 along the last dimension"):
        check_rows("x", torch.zeros(2, 3).T, (3, 2), FP32)


def test_several_tensors_are_named() -> None:
    tensor = torch.zeros(3)
    check_tensors((3,), FP32, first=tensor, missing=None)
    with pytest.raises(ValueError, match=r"second: \[2\] torch.float32: expected \[3\]"):
        check_tensors((3,), FP32, first=tensor, second=tensor[:2])


def test_partial_sums_have_two_forms() -> None:
    assert check_partial_sums("x", torch.zeros(2, 4).half(), 2, 4, FP16) == PartialSums(1, 0)
    assert check_partial_sums("x", torch.zeros(3, 5, 4)[:, :2], 2, 4, FP16) == PartialSums(3, 20)
    with pytest.raises(ValueError, match=r"x: \[3, 2, 4\] torch.float16: expected \[3, 2, 4\] torch.float32"):
        check_partial_sums("x", torch.zeros(3, 2, 4).half(), 2, 4, FP16)
    with pytest.raises(ValueError, match=r"x: \[0, 2, 4\] torch.float32: expected \[1, 2, 4\]"):
        check_partial_sums("x", torch.zeros(0, 2, 4), 2, 4, FP16)
    with pytest.raises(ValueError, match=r"x: \[8\] torch.float32: expected \[2, 4\]"):
        check_partial_sums("x", torch.zeros(8), 2, 4, FP32)


def test_numbers_are_checked() -> None:
    check_range("window", 0, 0)
    check_range("first_key", 15, 0, 15)
    with pytest.raises(ValueError, match="first_key=16: expected 0 to 15"):
        check_range("first_key", 16, 0, 15)
    with pytest.raises(ValueError, match="window=-1: expected 0 or more"):
        check_range("window", -1, 0)
    for value in (1, 2, 64):
        check_power_of_two("block_size", value)
    for value in (0, 3, -2):
        with pytest.raises(ValueError, match=f"block_size={value}: expected a power of two"):
            check_power_of_two("block_size", value)
