"""The slices of weights: equal and at the borders of shards where the inner dimension allows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drift_sdk._kernels.gemm.slices import (
    MAX_SLICED_COLUMNS,
    SLICE_ALIGNMENT,
    WIDE_ALIGNMENT,
    num_slices,
    shard_slices,
    slice_size,
)


def borders(num_columns: int, inner: int) -> list[int]:
    """The first inner index of every slice but the first."""
    size = slice_size(inner, num_slices(num_columns, inner))
    return list(range(size, inner, size))


@pytest.mark.parametrize(
    ("num_columns", "inner", "expected"),
    [
        (6144, 4096, [2048]),  # Llama-3.1-8B: qkv, output, down
        (4096, 4096, [2048]),
        (4096, 14_336, [7168]),
        (8192, 28_672, [14_336]),  # Llama-3.1-70B: down
        (4096, 12_288, [6144]),  # the fusion of an EAGLE-3 draft for Llama-3.1-8B
        (576, 1536, [384, 768, 1152]),  # SmolLM2-135M: down
        (576, 576, [192, 384]),  # its output has nine heads of 64
        (3584, 18_944, [4736, 9472, 14_208]),  # Qwen2.5-7B: down
        (896, 4864, [2432]),  # Qwen2.5-0.5B: a quarter of down is no multiple of 128
        (896, 896, [448]),  # its output has fourteen heads of 64
        (128_256, 4096, []),  # a head
        (64, 64, []),
        (64, 1, []),
    ],
)
def test_borders_of_known_shapes(num_columns: int, inner: int, expected: list[int]) -> None:
    assert borders(num_columns, inner) == expected


@given(st.integers(1, 200_000), st.integers(1, 70_000))
def test_slices_cover_the_inner_dimension_and_none_is_empty(num_columns: int, inner: int) -> None:
    found = borders(num_columns, inner)
    assert len(found) + 1 == num_slices(num_columns, inner) <= 4
    assert all(border % SLICE_ALIGNMENT == 0 for border in found)
    assert num_slices(num_columns, inner, is_whole=True) == 1


@given(st.integers(1, MAX_SLICED_COLUMNS), st.integers(1, 300))
def test_slices_are_halves_or_quarters_on_group_borders(num_columns: int, half: int) -> None:
    """So the shards of two GPUs, and groups of 128 columns, begin where slices begin."""
    inner = half * 2 * WIDE_ALIGNMENT
    found = borders(num_columns, inner)
    assert inner // 2 in found and len(found) in (1, 3)
    assert all(border % WIDE_ALIGNMENT == 0 and border % (inner // 4) == 0 for border in found)


@pytest.mark.parametrize(
    ("num_heads", "head_dim"), [(32, 128), (32, 80), (32, 96), (8, 256), (64, 64), (28, 128)]
)
def test_slices_are_whole_heads_for_common_numbers_of_heads(num_heads: int, head_dim: int) -> None:
    for num_columns in (2048, 4096):
        assert all(border % head_dim == 0 for border in borders(num_columns, num_heads * head_dim))


def test_fewer_columns_never_have_fewer_slices() -> None:
    for inner in (128, 576, 1024, 4096, 18_944):
        found = [num_slices(num_columns, inner) for num_columns in (64, 4095, 4096, 20_000, 20_001)]
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("num_columns", "inner", "expected"),
    [
        (4096, 14_336, {2: 1, 4: 1, 8: 1}),  # Llama-3.1-8B: down
        (2048, 8192, {2: 2, 4: 1, 8: 1}),  # Llama-3.2-1B: down
        (8192, 28_672, {2: 1, 4: 1, 8: 1}),  # Llama-3.1-70B: down
        (576, 576, {2: 0, 4: 0, 8: 0}),  # SmolLM2-135M: output, nine heads of 64
        (896, 4864, {2: 1, 4: 1, 8: 0}),  # Qwen2.5-0.5B: down
    ],
)
def test_slices_of_shards_of_known_shapes(num_columns: int, inner: int, expected: dict[int, int]) -> None:
    assert {size: shard_slices(num_columns, inner, size) for size in expected} == expected


@given(st.integers(1, 30_000), st.integers(1, 70_000), st.sampled_from((2, 4, 8)))
def test_shards_consist_of_whole_slices(num_columns: int, inner: int, num_shards: int) -> None:
    """Those of one GPU, if there are enough of them."""
    number = shard_slices(num_columns, inner, num_shards)
    if not number:
        return

    size = slice_size(inner // num_shards, number)
    assert number * num_shards * size == inner and size % SLICE_ALIGNMENT == 0
    if num_slices(num_columns, inner) % num_shards == 0:
        assert size == slice_size(inner, num_slices(num_columns, inner))
    else:
        assert number == 1
