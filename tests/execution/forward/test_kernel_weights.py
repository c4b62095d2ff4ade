"""Quantised weights of all formats as the kernels take them: with the numbers that they had."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from msgspec import structs
from quantised_files import random_blocks

from drift_sdk.execution.forward.kernel_weights import (
    KernelExperts,
    KernelWeight,
    arrange_experts,
    arrange_matrix,
)
from drift_sdk.quantised.formats import (
    BLOCK_FORMATS,
    BlockFormat,
    BlockWeight,
    quantise_fp8,
    quantise_int4,
    quantise_nvfp4,
    stack_rows,
)
from drift_sdk.quantised.weight import QuantisedWeight, TiledWeight, dequantised

pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SCALE_PLACES: dict[BlockFormat, tuple[int, ...]] = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
"""Bytes at which the float16 numbers of a block begin; of the other formats 0 and 2."""
BITS: dict[BlockFormat, float] = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "Q8_0": 8.5, "Q4_K": 6.0, "Q5_K": 10.0, "Q6_K": 10.0,
}  # fmt: skip
"""Bits of a number as the kernels take it, scales and offsets included."""


def finite_blocks(name: BlockFormat, rows: int, columns: int = 512) -> BlockWeight:
    """Random blocks whose float16 numbers are between 1/64 and 1/32."""
    blocks = random_blocks(name, rows, columns, seed=rows).blocks
    generator = torch.Generator().manual_seed(rows)
    for place in SCALE_PLACES.get(name, (0, 2)):
        scales = (1 + torch.rand(*blocks.shape[:2], 1, generator=generator)) / 64
        blocks[:, :, place : place + 2] = scales.to(torch.float16).view(torch.uint8)
    return BlockWeight(blocks, name)


def check(matrix: QuantisedWeight, *, is_gated: bool = False) -> KernelWeight:
    """Arrange a matrix, and compare its numbers."""
    arranged = arrange_matrix(matrix.to(DEVICE), torch.float32, is_gated=is_gated)
    assert isinstance(arranged, KernelWeight)
    assert torch.equal(arranged.dequantise(torch.float32).cpu(), matrix.dequantise(torch.float32))
    return arranged


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_keep_their_numbers(name: BlockFormat, is_gated: bool) -> None:
    arranged = check(finite_blocks(name, rows=64), is_gated=is_gated)
    assert arranged.nbytes == 64 * 512 * BITS[name] / 8


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_columns_in_another_order_take_no_more(name: BlockFormat) -> None:
    """Runs of 64 columns, a part of a block of 256."""
    arranged = check(TiledWeight(finite_blocks(name, rows=64), outer=2, inner=4))
    assert arranged.nbytes == 64 * 512 * BITS[name] / 8


@pytest.mark.parametrize(
    "names", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q5_0", "Q4_1"), ("Q8_0", "Q4_0", "Q5_0")], ids=str
)
def test_parts_of_several_formats_keep_their_numbers(names: tuple[BlockFormat, ...]) -> None:
    """Projections of queries, keys and values in different formats, as in Q4_K_M files."""
    parts = [finite_blocks(name, rows) for name, rows in zip(names, (48, 16, 24), strict=True)]
    check(stack_rows(parts))


def test_nvfp4_keeps_its_numbers() -> None:
    matrix = torch.randn(48, 192, generator=torch.Generator().manual_seed(0))
    arranged = check(quantise_nvfp4(matrix))
    assert (arranged.packed.code_type, arranged.packed.group_size) == ("e2m1", 16)
    assert arranged.nbytes == 64 * 192 * 6 / 8  # 64 rows: whole panels


def test_other_parts_and_shapes_are_expanded() -> None:
    """Beside integers, numbers and e4m3; columns that are no multiple of 64, rows of a gate of 8."""
    matrix = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
    blocks = finite_blocks("Q8_0", 16)
    for other in (matrix, quantise_fp8(matrix), quantise_int4(matrix)):
        stacked = stack_rows([blocks, other])
        found = arrange_matrix(stacked, torch.float32)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, stacked.dequantise(torch.float32))
    for narrow in (finite_blocks("Q8_0", 16, 96), quantise_nvfp4(matrix[:, :72])):
        assert isinstance(arrange_matrix(narrow, torch.float32), torch.Tensor)
    assert isinstance(arrange_matrix(finite_blocks("Q8_0", 24), torch.float32, is_gated=True), torch.Tensor)


def expert_numbers(experts: KernelExperts) -> torch.Tensor:
    """The numbers [E, N, K] of arranged experts, each by itself."""
    weight, num_experts = experts.packed.weight, experts.packed.num_experts

    def part(tensor: torch.Tensor | None, index: int) -> torch.Tensor | None:
        return None if tensor is None else tensor.chunk(num_experts)[index].contiguous()

    names = ("codes", "scales", "zeros", "offsets", "row_scales")
    parts = [
        KernelWeight(
            structs.replace(
                weight,
                num_columns=experts.packed.num_columns,
                **{name: part(getattr(weight, name), index) for name in names},
            )
        )
        for index in range(num_experts)
    ]
    return torch.stack([each.dequantise(torch.float32) for each in parts]).cpu()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", ["fp8", "int4", "nvfp4", "Q4_K", "Q5_K"])
def test_experts_keep_their_numbers(name: str, is_gated: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    quantise = {"fp8": quantise_fp8, "int4": quantise_int4, "nvfp4": quantise_nvfp4}.get(name)
    matrices = tuple(
        finite_blocks(cast(BlockFormat, name), rows=128)
        if quantise is None
        else quantise(torch.randn(128, 192, generator=generator))
        for _ in range(3)
    )
    arranged = arrange_experts(tuple(each.to(DEVICE) for each in matrices), torch.float32, is_gated=is_gated)
    assert isinstance(arranged, KernelExperts)
    expected = torch.stack([each.dequantise(torch.float32) for each in matrices])
    assert torch.equal(expert_numbers(arranged), expected)


def test_experts_of_several_formats_are_expanded() -> None:
    matrix = torch.linspace(-1.0, 1.0, 64 * 128, device=DEVICE).view(64, 128)
    fp8, int4 = quantise_fp8(matrix), quantise_int4(matrix)
    for parts in ((fp8, int4), (fp8, matrix)):
        arranged = arrange_experts(parts, torch.float32)
        assert isinstance(arranged, torch.Tensor)
        for found, part in zip(arranged, parts, strict=True):
            assert torch.equal(found, dequantised(part, torch.float32))
    ragged = quantise_fp8(matrix[:, :100].contiguous())
    assert isinstance(arrange_experts((ragged, ragged), torch.float32), torch.Tensor)
    assert arrange_experts(matrix, torch.float32) is matrix
