"""Matrices of the rows of several."""

from __future__ import annotations

import pytest
import torch
from quantised_files import random_blocks

from drift_sdk.quantised.formats import (
    BlockWeight,
    Fp8Weight,
    Int4Weight,
    quantise_fp8,
    quantise_int4,
    stack_rows,
)
from drift_sdk.quantised.weight import Matrix, StackedWeight, dense, dequantised, take_rows

MATRIX = torch.randn((24, 512), generator=torch.Generator().manual_seed(0))
FP8, INT4 = quantise_fp8(MATRIX), quantise_int4(MATRIX)


@pytest.mark.parametrize(
    "parts, kind",
    [
        ((FP8, FP8, FP8), Fp8Weight),
        ((INT4, INT4), Int4Weight),
        ((random_blocks("Q4_1"), random_blocks("Q4_1")), BlockWeight),
        ((random_blocks("Q4_K"), random_blocks("Q6_K")), StackedWeight),
        ((FP8, INT4), StackedWeight),
        ((FP8, MATRIX), StackedWeight),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_parts_in_order(parts: tuple[Matrix, ...], kind: type, dtype: torch.dtype) -> None:
    stacked = stack_rows(parts)
    assert type(stacked) is kind
    assert stacked.shape == (24 * len(parts), 512)
    expected = torch.cat([dequantised(part, dtype) for part in parts])
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert torch.equal(stacked.dequantise(dtype).view(bits), expected.view(bits))
    assert stacked.nbytes == sum(part.nbytes for part in parts)


def test_one_part_that_is_not_quantised() -> None:
    assert dense(MATRIX) is MATRIX
    assert torch.equal(take_rows(MATRIX, torch.tensor([3, 1])), MATRIX[[3, 1]])
    with pytest.raises(TypeError, match="Fp8Weight: expected a tensor"):
        dense(FP8)
