"""Decays and rates of the gated delta rule, from the product of rows with their two projections.

    rate = sigmoid(b);  decay = -exp(decay_weight) * softplus(a + step) / ln 2

The product has b of all heads, then a. Decays are logarithms, base 2.

Grid: (rows). Order of summation: slices in ascending order in float32, then rounded to the storage type; the
sigmoid is rounded too, as in the models.

Dependent launch: it follows a product, so it permits its dependents to start at once, and then waits.

The norm of a recurrent layer's output, head by head, with a gate.

    out[r, h] = rms_norm(x[r, h]) * weight * silu(z[r, h])

Grid: (rows, blocks of heads). A program owns BLOCK_HEADS heads of a row; the order of a sum of squares
depends on that and on the size of a head, not on the number of rows.

Order of summation: slices of z in ascending order in float32, then rounded to the storage type. The norm is
rounded as its kind says (norm.py), silu and the last product are float32, and rounded once.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_partial_sums, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import NormKind, inverse_rms, weigh

LN_2 = tl.constexpr(0.6931471805599453)


@kernel
def _fill_gates(
    product_ptr,  # [NUM_SLICES, R, 2 * NUM_HEADS] fp32, or [R, 2 * NUM_HEADS] in the storage type
    decay_ptr,  # [NUM_HEADS] fp32
    step_ptr,  # [NUM_HEADS], storage type
    gates_ptr,  # [R, 2 * NUM_HEADS] fp32, written: decays, then rates
    slice_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): one row."""
    start_dependents(PDL)
    head = tl.arange(0, PADDED_HEADS)
    is_head = head < NUM_HEADS
    decay = tl.load(decay_ptr + head, mask=is_head, other=0.0)
    step = tl.load(step_ptr + head, mask=is_head, other=0.0)
    wait_for_producers(PDL)
    row = tl.program_id(0).to(tl.int64)
    b_ptrs = product_ptr + (row * row_stride + head)
    a_ptrs = b_ptrs + NUM_HEADS
    b = tl.load(b_ptrs, mask=is_head, other=0.0).to(tl.float32)
    a = tl.load(a_ptrs, mask=is_head, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        b += tl.load(b_ptrs + slice_index * slice_stride, mask=is_head, other=0.0)
        a += tl.load(a_ptrs + slice_index * slice_stride, mask=is_head, other=0.0)

    b = b.to(step.dtype).to(tl.float32)
    rate = (1.0 / (1.0 + tl.exp(-b))).to(step.dtype).to(tl.float32)
    x = a.to(step.dtype).to(tl.float32) + step.to(tl.float32)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    gates_ptrs = gates_ptr + (row * (2 * NUM_HEADS) + head)
    tl.store(gates_ptrs, -tl.exp(decay) * softplus / LN_2, mask=is_head)
    tl.store(gates_ptrs + NUM_HEADS, rate, mask=is_head)


def fill_gates(product: Tensor, decay: Tensor, step: Tensor, gates: Tensor) -> None:
    """Fill gates [R, 2 * heads] float32.

    product: [R, 2 * heads] in the storage type, or fp32 partial sums [num_slices, R, 2 * heads]. decay
    [heads] float32; step [heads] in the storage type. Raises ValueError for another shape, type or layout.
    """
    num_rows, num_heads = gates.shape[0], step.shape[0]
    slices = check_partial_sums("product", product, num_rows, 2 * num_heads, step.dtype)
    check_tensor("decay", decay, (num_heads,), torch.float32)
    check_tensor("step", step, (num_heads,), step.dtype)
    check_tensor("gates", gates, (num_rows, 2 * num_heads), torch.float32)
    _fill_gates[(num_rows,)](
        product_ptr=product,
        decay_ptr=decay,
        step_ptr=step,
        gates_ptr=gates,
        slice_stride=slices.slice_stride,
        row_stride=product.stride(-2),
        NUM_HEADS=num_heads,
        PADDED_HEADS=next_power_of_2(num_heads),
        NUM_SLICES=slices.num_slices,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


BLOCK_HEADS, NUM_WARPS = 8, 4


@kernel
def _norm_gated(
    x_ptr,  # [R, NUM_HEADS, SIZE], storage type; updated in place
    gate_ptr,  # [NUM_SLICES, R, NUM_HEADS * SIZE] fp32, or [R, ...] in the storage type
    weight_ptr,  # [SIZE], storage type
    eps,
    slice_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NORM_KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block): some heads of a row."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, PADDED_SIZE)
    mask = (head < NUM_HEADS)[:, None] & (column < SIZE)[None, :]
    place = head[:, None] * SIZE + column[None, :]
    x_ptrs = x_ptr + (row * (NUM_HEADS * SIZE) + place)
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    gate_ptrs = gate_ptr + (row * row_stride + place)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        gate += tl.load(gate_ptrs + slice_index * slice_stride, mask=mask, other=0.0)

    gate = gate.to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    wide = x.to(tl.float32)
    scale = inverse_rms(tl.sum(wide * wide, axis=1), SIZE, eps)
    normed = weigh(wide * scale[:, None], weight[None, :], NORM_KIND).to(tl.float32)
    gated = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(x_ptrs, gated.to(x.dtype), mask=mask)


def norm_gated(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, norm_kind: NormKind) -> None:
    """Normalise x [R, heads * D] by heads, times weight [D] and silu(gate), in place, in the storage type.

    gate: [R, heads * D] in the storage type, or fp32 partial sums [num_slices, R, heads * D]; rows may have
    any stride. Raises ValueError for another shape, type or layout.
    """
    (num_rows, size), head_size = x.shape, weight.shape[0]
    num_heads = size // head_size
    check_tensor("x", x, (num_rows, num_heads * head_size), x.dtype)
    check_tensor("weight", weight, (head_size,), x.dtype)
    slices = check_partial_sums("gate", gate, num_rows, size, x.dtype)
    _norm_gated[(num_rows, cdiv(num_heads, BLOCK_HEADS))](
        x_ptr=x,
        gate_ptr=gate,
        weight_ptr=weight,
        eps=eps,
        slice_stride=slices.slice_stride,
        row_stride=gate.stride(-2),
        NUM_HEADS=num_heads,
        SIZE=head_size,
        PADDED_SIZE=next_power_of_2(head_size),
        BLOCK_HEADS=BLOCK_HEADS,
        NUM_SLICES=slices.num_slices,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
