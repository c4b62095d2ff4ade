"""Cases of a decoder's matrix products with quantised weights, as the engine quantises them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.quantised.packing import PackedWeight, can_pack
from drift_sdk._kernels.quantised.quantised_gemm import quantised_gated_multiply, quantised_multiply
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_matrix
from drift_sdk.models.matrix_reader import QUANTISERS, WeightForm, quantised_bytes
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import WeightShape, weight_shapes
from perf.harness.shapes import Model

__all__ = ["quantised_cases"]

FORMS: tuple[WeightForm, ...] = ("fp8", "int4")
ITEMSIZE = 2
"""Bytes of a bfloat16."""


def quantised_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield each weight of a layer and number of rows, in each form that the engine quantises to and the
    kernels have; weights of shapes that they do not have are left out."""
    shapes = [shape for shape in weight_shapes(model)[:-1] if can_pack(shape.num_columns, 128, shape.inner)]
    for form in FORMS:
        for weight in shapes:
            num_bytes = quantised_bytes(weight.num_columns, weight.inner, form)
            for num_rows in row_counts:
                yield Case(
                    kernel=form,
                    shape=str(weight),
                    num_rows=num_rows,
                    num_bytes=num_bytes + num_rows * weight.inner * ITEMSIZE,
                    num_flops=2 * num_rows * weight.num_columns * weight.inner,
                    prepare=partial(prepare, weight, form, num_rows, device),
                )


def prepare(weight: WeightShape, form: WeightForm, num_rows: int, device: str) -> Prepared:
    """Make random rows and several weights."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    x = torch.randn(num_rows, weight.inner, device=device, dtype=dtype)
    copies = num_copies(quantised_bytes(weight.num_columns, weight.inner, form))
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


def quantised(weight: WeightShape, form: WeightForm, dtype: torch.dtype, device: str) -> PackedWeight:
    """Return random numbers, quantised and arranged."""
    numbers: Tensor = torch.randn(weight.num_columns, weight.inner, device=device, dtype=dtype)
    matrix = QUANTISERS[form](numbers.mul_(weight.inner**-0.5))
    arranged = arrange_matrix(matrix, dtype, is_gated=weight.is_gated)
    assert isinstance(arranged, KernelWeight)
    return arranged.packed
