"""Blocks of GGUF files, against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from quantised_files import random_blocks

from drift_sdk.quantised.formats import BLOCK_FORMATS, CHUNK_NUMBERS, BlockFormat, BlockWeight

ROWS, COLUMNS = 24, 512


def expected_numbers(weight: BlockWeight) -> torch.Tensor:
    kind = GGMLQuantizationType[weight.format]
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(weight.blocks.flatten(1).numpy(), kind))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are equal; any NaN is equal to any other."""
    is_nan = expected.isnan()
    bits = [torch.where(is_nan, 0, tensor).view(torch.int32) for tensor in (found, expected)]
    return torch.equal(found.isnan(), is_nan) and torch.equal(*bits)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_sizes_are_those_of_the_format(name: BlockFormat) -> None:
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] == BLOCK_FORMATS[name]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_numbers_are_those_of_the_gguf_package(name: BlockFormat) -> None:
    weight = random_blocks(name)
    assert weight.shape == (ROWS, COLUMNS)
    assert same(weight.dequantise(torch.float32), expected_numbers(weight))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_byte_of_a_block_counts(name: BlockFormat) -> None:
    """A byte that is not read, or a scale of another group, would leave the numbers as they are."""
    weight = random_blocks(name, seed=1)
    before = weight.dequantise(torch.float32)
    for byte in range(weight.blocks.shape[2]):
        changed = BlockWeight(weight.blocks.clone(), name)
        changed.blocks[:, :, byte] ^= 0x5A
        after = changed.dequantise(torch.float32)
        assert same(after, expected_numbers(changed)), byte
        assert not same(after, before), byte


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    weight = random_blocks("Q4_K")
    expected = expected_numbers(weight).to(dtype)
    found = weight.dequantise(dtype)
    assert found.dtype == dtype and same(found.float(), expected.float())


def test_weights_of_several_chunks() -> None:
    weight = random_blocks("Q8_0", rows=CHUNK_NUMBERS // COLUMNS + 3)
    assert same(weight.dequantise(torch.float32), expected_numbers(weight))


def test_rows_are_looked_up() -> None:
    weight = random_blocks("Q6_K")
    index = torch.tensor([5, 0, 5, ROWS - 1])
    found = weight.rows(index)
    assert found.shape == (4, COLUMNS)
    assert same(found.dequantise(torch.float32), expected_numbers(weight)[index])


def test_blocks_of_another_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="expected 18 bytes in the last dimension"):
        BlockWeight(torch.zeros((2, 2, 20), dtype=torch.uint8), "Q4_0")
