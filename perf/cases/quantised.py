"""Cases of a decoder's matrix products with quantised weights: as the engine quantises them, and blocks of
GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.quantised.packing import PackedWeight, can_pack
from drift_sdk._kernels.quantised.quantised_gemm import quantised_gated_multiply, quantised_multiply
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_matrix
from drift_sdk.models.allocation import QUANTISERS, WeightForm, quantised_bytes
from drift_sdk.quantised.formats import BLOCK_FORMATS, BlockFormat, BlockWeight
from drift_sdk.quantised.weight import QuantisedWeight
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import WeightShape, weight_shapes
from perf.harness.shapes import Model

__all__ = ["quantised_cases"]

ITEMSIZE = 2
"""Bytes of a bfloat16."""
BLOCKS: dict[BlockFormat, tuple[float, tuple[int, ...]]] = {
    "Q4_0": (4.5, (0,)),
    "Q4_1": (5.0, (0, 2)),
    "Q8_0": (8.5, (0,)),
    "Q5_1": (9.0, (0, 2)),
    "Q4_K": (6.0, (0, 2)),
    "Q5_K": (10.0, (0, 2)),
    "Q6_K": (10.0, (208,)),
}
"""Formats of blocks: bits of a number as the kernels have it, and places of the float16 scales in a block.
Q5_0 is Q8_0 to the kernels."""
SCALE = 2.0**-12


class Form(Struct, frozen=True):
    """A form of a weight.

    multiple: of which its number of columns is one. num_bytes(rows, columns): bytes as the kernels have them.
    draw(rows, columns, dtype, device): a random weight; dtype: of the numbers that it is quantised from.
    """

    name: str
    multiple: int
    num_bytes: Callable[[int, int], int]
    draw: Callable[[int, int, torch.dtype, str], QuantisedWeight]


def quantised_when_loaded(form: WeightForm) -> Form:
    """A form that the engine quantises to. In NVFP4 kernels have a scale of float32 for each 16 numbers."""

    def draw(rows: int, columns: int, dtype: torch.dtype, device: str) -> QuantisedWeight:
        numbers: Tensor = torch.randn(rows, columns, device=device, dtype=dtype)
        return QUANTISERS[form](numbers.mul_(columns**-0.5))

    def num_bytes(rows: int, columns: int) -> int:
        return rows * columns * 3 // 4 if form == "nvfp4" else quantised_bytes(rows, columns, form)

    return Form(form, 2, num_bytes, draw)


def blocks_of_file(form: BlockFormat) -> Form:
    """Random blocks with scales of one size."""
    (block_columns, block_bytes), (bits, places) = BLOCK_FORMATS[form], BLOCKS[form]

    def draw(rows: int, columns: int, _: torch.dtype, device: str) -> QuantisedWeight:
        shape = rows, columns // block_columns, block_bytes
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        scale = torch.tensor([SCALE], dtype=torch.float16, device=device).view(torch.uint8)
        for place in places:
            blocks[:, :, place : place + 2] = scale
        return BlockWeight(blocks, form)

    return Form(form, block_columns, lambda rows, columns: int(rows * columns * bits / 8), draw)


LOADED: tuple[WeightForm, ...] = ("fp8", "int4", "nvfp4")
FORMS = (*map(quantised_when_loaded, LOADED), *map(blocks_of_file, BLOCKS))


def quantised_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield each weight of a layer and number of rows, in each form that the kernels have; weights of shapes
    that they do not have are left out, and blocks whose size does not divide their rows."""
    shapes = [shape for shape in weight_shapes(model)[:-1] if can_pack(shape.num_columns, 128, shape.inner)]
    for form in FORMS:
        for weight in [shape for shape in shapes if shape.inner % form.multiple == 0]:
            num_bytes = form.num_bytes(weight.num_columns, weight.inner)
            for num_rows in row_counts:
                yield Case(
                    kernel=form.name,
                    shape=str(weight),
                    num_rows=num_rows,
                    num_bytes=num_bytes + num_rows * weight.inner * ITEMSIZE,
                    num_flops=2 * num_rows * weight.num_columns * weight.inner,
                    prepare=partial(prepare, weight, form, num_rows, device),
                )


def prepare(weight: WeightShape, form: Form, num_rows: int, device: str) -> Prepared:
    """Make random rows and several weights."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    x = torch.randn(num_rows, weight.inner, device=device, dtype=dtype)
    copies = num_copies(form.num_bytes(weight.num_columns, weight.inner))
    weights = [quantised(weight, form, dtype, device) for _ in range(copies)]
    if weight.is_gated:
        out, gate_up = (
            torch.empty(num_rows, columns, dtype=dtype, device=device)
            for columns in (weight.num_columns // 2, weight.num_columns)
        )

        def call(packed: PackedWeight) -> None:
            quantised_gated_multiply(x, packed, out, gate_up)
    else:
        out = torch.empty(weights[0].num_slices, num_rows, weight.num_columns, device=device)

        def call(packed: PackedWeight) -> None:
            quantised_multiply(x, packed, out)

    def step() -> None:
        for packed in weights:
            call(packed)

    return Prepared(step, copies, (out,))


def quantised(weight: WeightShape, form: Form, dtype: torch.dtype, device: str) -> PackedWeight:
    """Return a random weight, arranged."""
    matrix = form.draw(weight.num_columns, weight.inner, dtype, device)
    arranged = arrange_matrix(matrix, dtype, is_gated=weight.is_gated)
    assert isinstance(arranged, KernelWeight)
    return arranged.packed
