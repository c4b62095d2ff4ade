"""The residual stream takes what a layer adds to it and is normalised, in one pass.

Bytes: three rows of the storage type and NUM_SLICES rows of fp32 for each row; a program has one row, in
registers: made for H up to 16,384. With a few rows the time is that of a launch and one trip to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.layers.rms_norm import inverse_rms, norm_warps, rms_norm_reference, weigh

__all__ = ["add_norm", "add_norm_reference"]


@triton.jit
def _add_norm(
    hidden, delta, bias, weight, normed, aux_hidden, eps,
    hidden_stride, slice_stride, delta_stride, normed_stride, aux_hidden_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    hidden += row * hidden_stride + column
    # Loaded here, the weight is not waited for after the sum.
    weights = tl.load(weight + column, mask=is_column, other=0.0)
    if NUM_SLICES > 0:
        # A product has made delta right before; the residual stream is older.
        start_dependents(PDL)
        x = tl.load(hidden, mask=is_column, other=0.0, cache_modifier=".cg")
        wait_for_producers(PDL)
    else:
        wait_for_producers(PDL)
        start_dependents(PDL)
        x = tl.load(hidden, mask=is_column, other=0.0)
    if NUM_SLICES > 0:
        delta += row * delta_stride + column
        total = tl.load(delta, mask=is_column, other=0.0).to(tl.float32)
        for index in tl.static_range(1, NUM_SLICES):
            total += tl.load(delta + index * slice_stride, mask=is_column, other=0.0)

        if bias is not None:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)

        x = (x.to(tl.float32) + total.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(hidden, x, mask=is_column)

    if aux_hidden is not None:
        tl.store(aux_hidden + row * aux_hidden_stride + column, x, mask=is_column)

    wide = x.to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    tl.store(normed + row * normed_stride + column, weigh(scaled, weights), mask=is_column)


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    aux_hidden: Tensor | None = None,
) -> None:
    """hidden += delta in place, then normed = rms_norm(hidden) * weight.

    hidden [N, H] in the storage type; weight [H] and normed [N, H] likewise.
    delta: [N, H] in the storage type, or fp32 partial sums [num_slices, N, H], added in the order of slices,
    then bias [H] (storage type) if given, then rounded to the storage type; or None for the norm alone.
    Beside a delta, which a product made right before, hidden must be older than that product.
    aux_hidden [N, H], if given, takes a copy of the updated hidden. Rows of all but weight and bias may stand
    apart. Raises ValueError for another shape, type or layout.
    """
    num_rows, size = hidden.shape
    dtype = hidden.dtype
    check_rows("hidden", hidden, (num_rows, size), dtype)
    check_tensor("weight", weight, (size,), dtype)
    check_rows("normed", normed, (num_rows, size), dtype)
    num_slices = 0
    if delta is not None and delta.dim() == 3:
        num_slices = delta.shape[0]
        check_rows("delta", delta, (max(num_slices, 1), num_rows, size), torch.float32)
    elif delta is not None:
        num_slices = 1
        check_rows("delta", delta, (num_rows, size), dtype)

    if bias is not None:
        check_tensor("bias", bias, (size,), dtype)
        if delta is None:
            raise ValueError("bias: given without delta: expected None")

    if aux_hidden is not None:
        check_rows("aux_hidden", aux_hidden, (num_rows, size), dtype)

    _add_norm[(num_rows,)](
        hidden,
        delta,
        bias,
        weight,
        normed,
        aux_hidden,
        eps,
        hidden.stride(0),
        delta.stride(0) if delta is not None and delta.dim() == 3 else 0,
        0 if delta is None else delta.stride(-2),
        normed.stride(0),
        0 if aux_hidden is None else aux_hidden.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        NUM_SLICES=num_slices,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


def add_norm_reference(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The updated hidden, and normed: what `add_norm` writes, in new tensors."""
    if delta is not None:
        total = delta if delta.dim() == 2 else _sum_in_order(delta)
        if bias is not None:
            total = total.to(torch.float32) + bias.to(torch.float32)

        hidden = hidden + total.to(hidden.dtype)

    return hidden, rms_norm_reference(hidden, weight, eps)


def _sum_in_order(partials: Tensor) -> Tensor:
    total = partials[0]
    for part in partials[1:]:
        total = total + part

    return total
