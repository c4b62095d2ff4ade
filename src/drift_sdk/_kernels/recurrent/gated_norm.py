"""The norm of a recurrent layer's output, head by head, with a gate.

    out[r, h] = rms_norm(x[r, h]) * weight * silu(z[r, h])

Grid: (rows, blocks of heads). A program owns BLOCK_HEADS heads of a row; the order of a sum of squares
depends on that and on the size of a head, not on the number of rows.

Order of summation: slices of z in ascending order in float32, then rounded to the storage type. The norm is
rounded as its kind says (norm.py), silu and the last product are float32, and rounded once.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_partial_sums, check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv, next_power_of_2
from drift_sdk._kernels.layers.norm import NormKind, inverse_rms, weigh

__all__ = ["norm_gated"]

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
