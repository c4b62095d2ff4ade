"""The sums of paged attention in CUDA C++: bit for bit those of Triton, whatever the launch configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from attention_step import AttentionStep
from tolerances import assert_near

from drift_sdk._kernels.attention.cuda_attention import CudaAttentionConfig, cuda_attend, has_cuda_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.paged_attention import (
    AttentionConfig,
    _attend_in_triton,
    paged_attention,
    paged_attention_reference,
)
from drift_sdk._kernels.attention.planned_rows import PlannedRows

pytestmark = pytest.mark.kernel

# Keys of sequences: one key, ends on borders of tiles and partitions and around them, padding rows (0), many.
LENGTHS = [
    [1],
    [64, 65, 127, 128, 129, 0, 2047, 2048, 2049, 4096, 4097, 5003],
    [700, 3, 31, 999, 0, 0, 1500, 64] * 8,
    [9000, 17],
]
CONFIGS = [CudaAttentionConfig(), CudaAttentionConfig(1, 3), CudaAttentionConfig(2, 4)]


def sums_of(step: AttentionStep, attend: Callable[[], None]) -> list[torch.Tensor]:
    """What `attend` writes to the scratch memory, as integers, so that NaN is compared too."""
    tensors = (step.scratch.sums, step.scratch.maxima, step.scratch.weights)
    for tensor in tensors:
        tensor.fill_(torch.nan)
    attend()
    return [tensor.view(torch.int32).clone() for tensor in tensors]


def assert_sums_are_those_of_triton(step: AttentionStep) -> None:
    in_triton = partial(_attend_in_triton, step.layer, step.rows, step.scratch, AttentionConfig())
    expected = sums_of(step, in_triton)
    assert has_cuda_attention(step.layer, step.rows, step.scratch.plan.partitions.tile)
    for config in CONFIGS:
        found = sums_of(step, partial(cuda_attend, step.layer, step.rows, step.scratch, config))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), config


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 256])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("heads", [(32, 8, 128), (2, 2, 128), (28, 4, 128), (14, 2, 64), (9, 3, 64)], ids=str)
def test_sums_are_those_of_triton(
    heads: tuple[int, int, int], num_rows: int, block_size: int, device: str
) -> None:
    if num_rows * heads[0] // heads[1] > 16:
        return  # left to Triton, see below

    for lengths in LENGTHS:
        step = AttentionStep(lengths, num_rows, heads, block_size, device)
        assert_sums_are_those_of_triton(step)
        paged_attention(step.layer, step.rows, step.scratch, AttentionConfig())
        expected = paged_attention_reference(step.layer, step.rows)
        assert_near(step.layer.out, expected, inner=max(lengths), magnitude=8.0, num_roundings=1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 4, 64), (12, 4, 128)], ids=str)
def test_companions_have_the_sums_of_triton(heads: tuple[int, int, int], num_rows: int, device: str) -> None:
    lengths = [3000, 2999, 2500, 2048, 2700, 3071, 1999, 2222]
    for num_shared in (1, 3):
        step = AttentionStep(lengths, num_rows, heads, 64, device, num_shared=num_shared)
        assert_sums_are_those_of_triton(step)


def test_other_attention_is_left_to_triton(device: str) -> None:
    def found(
        heads: tuple[int, int, int] = (4, 2, 128),
        num_rows: int = 1,
        block_size: int = 64,
        tile_keys: int = 64,
        **options: int,
    ) -> bool:
        kv = torch.empty(4, heads[1], block_size, heads[2], dtype=torch.bfloat16, device=device)
        query = torch.empty(num_rows, heads[0], heads[2], dtype=torch.bfloat16, device=device)
        places = torch.zeros(num_rows, dtype=torch.int32, device=device)
        layer = LayerAttention(
            query=query,
            out=torch.empty_like(query),
            kv=LayerKV(kv, kv),
            block_table=torch.zeros(1, 4, dtype=torch.int32, device=device),
            **options,
        )
        return has_cuda_attention(layer, PlannedRows(places, places, num_rows), tile_keys)

    assert not found(window=64)
    assert not found(first_key=1)
    assert not found(heads=(64, 2, 128))
    assert not found(heads=(4, 2, 96))
    assert not found(num_rows=16)
    assert not found(block_size=32)
    assert not found(tile_keys=32)
