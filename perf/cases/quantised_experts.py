"""Cases of the products of experts with quantised weights, in each form that the kernels have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from drift_sdk._kernels.experts.packed_products import (
    PackedExperts,
    packed_expert_multiply,
    packed_gated_expert_multiply,
)
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.forward.kernel_weights import KernelExperts, arrange_experts
from perf.cases.case import Case, Prepared
from perf.cases.experts import DOWN, GATE_UP, matrix_shape, routed
from perf.cases.quantised import FORMS, Form
from perf.harness.shapes import Model

__all__ = ["quantised_expert_cases"]


def quantised_expert_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield both products of experts chosen at random, in each form that divides their rows. None for a model
    without experts, or with experts in MXFP4.

    A product's bytes are those of the experts that the rows have, on average. The table has no influence.
    """
    experts = model.spec.experts
    if experts is None or model.has_mxfp4_experts:
        return

    for form in FORMS:
        for kernel in (GATE_UP, DOWN):
            columns, inner = matrix_shape(model, kernel)
            if inner % form.multiple:
                continue

            for num_rows in row_counts:
                yield Case(
                    kernel=f"{form.name} {kernel}",
                    shape=f"{experts.num_experts}x{columns}x{inner}",
                    num_rows=num_rows,
                    num_bytes=model.spread_experts(num_rows) * form.num_bytes(columns, inner),
                    num_flops=2 * num_rows * experts.num_active * columns * inner,
                    prepare=partial(prepare, model, form, kernel, num_rows, device),
                )


def prepare(model: Model, form: Form, kernel: str, num_rows: int, device: str) -> Prepared:
    """Make random rows and matrices, and several choices of experts."""
    experts = model.spec.experts
    assert experts is not None
    made = routed(experts, num_rows, device)
    columns, inner = matrix_shape(model, kernel)
    num_pairs, is_gated = num_rows * experts.num_active, kernel == GATE_UP
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    matrices = tuple(form.draw(columns, inner, dtype, device) for _ in range(experts.num_experts))
    arranged = arrange_experts(matrices, dtype, is_gated=is_gated)
    assert isinstance(arranged, KernelExperts)
    packed: PackedExperts = arranged.packed
    x = torch.randn(num_rows if is_gated else num_pairs, inner, device=device).to(dtype)
    if is_gated:
        out = torch.empty(num_pairs, columns // 2, dtype=dtype, device=device)
    else:
        out = torch.empty(experts.num_active, num_rows, columns, device=device)
    multiply = packed_gated_expert_multiply if is_gated else packed_expert_multiply

    def step() -> None:
        for rows, _, _ in made:
            multiply(x, packed, rows, out)

    return Prepared(step, len(made), (out,))
