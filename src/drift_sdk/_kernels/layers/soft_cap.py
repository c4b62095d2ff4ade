"""Logits bounded smoothly (Gemma).

    logits[r, v] = cap * tanh(logits[r, v] / cap)

Grid: (rows, blocks of columns). A program owns BLOCK_COLUMNS columns of one row.

With a = abs(x), tanh(x) has the sign of x and the magnitude

    a - a^3 / 3 + 2 / 15 * a^5 - 17 / 315 * a^7 + 62 / 2835 * a^9            below SERIES_END
    1 - 2 / (e^(2 * a) + 1)                                                  from there on

and e^y is 2^n * e^g, where n is y / log(2) rounded, and e^g the sum of the first eight terms of its series.
All operations are those of IEEE 754 in float32, without fused multiply-adds, so that the bits are the same on
every device. For all float32 numbers, tanh is within 1.2e-7 of the true value, and never falls as x rises: a
token with the largest logit still has the largest, though others may now have an equal one.

Bytes: a logit in and out; nothing else counts.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_rows
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

BLOCK_COLUMNS = 1_024
"""Columns of a program: 8 for each of the 128 threads of four warps, two loads of 16 bytes."""

NUM_WARPS = 4

IDENTITY_END = tl.constexpr(2.0**-13)
"""The cubic term of smaller numbers is less than a quarter of their last place: tanh(x) is x."""

SERIES_END = tl.constexpr(0.25)
"""The next term of the series is less than 1e-8 of its sum; the other formula is as near from here on."""

SATURATION = tl.constexpr(10.0)
"""tanh is 1 in float32 here, and e^(2 * a) does not overflow."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
EXPONENT_BIAS = tl.constexpr(127)
MANTISSA_BITS = tl.constexpr(23)


@device_function
def _exp(
    y,  # fp32, 0 to 20
):
    """Return e^y."""
    binary = y * LOG2_E
    exponent = (binary + 0.5).to(tl.int32)
    g = (binary - exponent.to(tl.float32)) * LN_2
    series = g * (1 / 5040) + 1 / 720
    series = series * g + 1 / 120
    series = series * g + 1 / 24
    series = series * g + 1 / 6
    series = series * g + 1 / 2
    series = series * g + 1.0
    series = series * g + 1.0
    return series * ((exponent + EXPONENT_BIAS) << MANTISSA_BITS).to(tl.float32, bitcast=True)


@device_function
def _tanh(
    x,  # fp32
):
    """Return tanh(x); of NaN NaN."""
    magnitude = tl.abs(x)
    bounded = tl.minimum(magnitude, SATURATION)
    square = bounded * bounded
    series = square * (62 / 2835) - 17 / 315
    series = series * square + 2 / 15
    series = series * square - 1 / 3
    low = bounded + bounded * square * series
    denominator = _exp(2.0 * bounded) + 1.0
    high = 1.0 - tl.div_rn(tl.zeros_like(denominator) + 2.0, denominator)
    value = tl.where(bounded < SERIES_END, low, high)
    value = tl.where(x < 0.0, -value, value)
    # Not so of NaN: x.
    return tl.where(magnitude >= IDENTITY_END, value, x)


@kernel
def _soft_cap(
    logits_ptr,  # [R, SIZE] fp32; updated in place
    cap,
    logits_stride,
    SIZE: tl.constexpr,  # columns
    BLOCK_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block): one block of a row's columns."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = column < SIZE
    logits_ptrs = logits_ptr + (row * logits_stride + column)
    logits = tl.load(logits_ptrs, mask=column_mask, other=0.0)
    capped = cap * _tanh(tl.div_rn(logits, tl.zeros_like(logits) + cap))
    tl.store(logits_ptrs, capped, mask=column_mask)


def soft_cap(logits: Tensor, cap: float) -> None:
    """cap * tanh(logits / cap) of logits [R, V] float32, in place.

    NaN remains NaN. Rows may have any stride. Raises ValueError for another shape, type or layout, and for a
    cap that is not positive and finite.
    """
    num_rows, size = logits.shape
    check_rows("logits", logits, (num_rows, size), torch.float32)
    if not 0.0 < cap < math.inf:
        raise ValueError(f"cap={cap}: expected a positive finite number")

    _soft_cap[(num_rows, cdiv(size, BLOCK_COLUMNS))](
        logits_ptr=logits,
        cap=float(cap),
        logits_stride=logits.stride(0),
        SIZE=size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        # A fused multiply-add would round otherwise.
        enable_fp_fusion=False,
        **launch_options(),
    )
