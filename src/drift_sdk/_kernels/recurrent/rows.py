"""Rows of a recurrent layer around the gated delta rule: convolution, gates, and the norm of its output.

The causal convolution of recurrent layers, by channels: queries, keys and values of rows.

    mixed[r, c] = silu(sum over j < WIDTH of weight[c, j] * x[r - WIDTH + 1 + j, c])

The rows before a sequence's row are those before it in the step, as far as they have its slot, or lie in the
slot's ring of the last rows; before position 0 they are 0. Of each query and key also the factor is stored
that makes its length 1, the one of queries divided by the square root of the key's dimensions.

    mix_rows:    rows of a step. Those that are decoded or verified are added to the rings
    keep_inputs: the last rows of prompts are added to the rings, and rows before borders to checkpoints

Grids: (blocks of rows, heads) and (runs, blocks of channels). The tile of a program is the same for any
number of rows, since the order of a length's sum depends on it.

Order of summation: slices in ascending order in float32, rounded to the storage type; taps in ascending order
by fused multiply-adds in float32, rounded; silu in float32, rounded; the square of a length in float32.

Dependent launch: both wait first, then permit their dependents to start.

Decays and rates of the gated delta rule, from the product of rows with their two projections.

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

from drift_sdk._kernels.launch.arguments import (
    PartialSums,
    cdiv,
    check_partial_sums,
    check_range,
    check_tensor,
    next_power_of_2,
)
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import NormKind, inverse_rms, weigh
from drift_sdk._kernels.recurrent.gated_delta import MixedRows, PromptRuns
from drift_sdk.spec.model import BORDER, GatedDelta, num_input_rows

BLOCK_ROWS, BLOCK_CHANNELS, NUM_WARPS = 8, 512, 4
EPS = tl.constexpr(1e-6)
"""Added to the square of a length."""


@device_function
def _load_rows(
    product_ptr,
    ring_ptr,  # [num_slots, RING, channels]
    row,  # [BLOCK_ROWS] int64: of the step
    slot,  # [BLOCK_ROWS]; -1: none
    position,  # [BLOCK_ROWS]
    is_here,  # [BLOCK_ROWS]: whether the rows are rows of the step
    channel,  # [BLOCK]
    is_channel,
    slice_stride,
    row_stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RING: tl.constexpr,
):
    """Return inputs [BLOCK_ROWS, BLOCK] in the storage type of the ring."""
    here = is_here[:, None] & is_channel[None, :]
    ptrs = product_ptr + (row[:, None] * row_stride + channel[None, :])
    x = tl.load(ptrs, mask=here, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        x += tl.load(ptrs + slice_index * slice_stride, mask=here, other=0.0)
    is_kept = (slot >= 0) & (position >= 0) & (is_here == 0)
    place = slot.to(tl.int64) * RING + tl.where(is_kept, position, 0) % RING
    kept_ptrs = ring_ptr + (place[:, None] * NUM_CHANNELS + channel[None, :])
    kept = tl.load(kept_ptrs, mask=is_kept[:, None] & is_channel[None, :], other=0.0)
    return tl.where(is_here[:, None], x.to(kept.dtype), kept)


@kernel
def _mix_rows(
    product_ptr,  # [NUM_SLICES, R, at least NUM_CHANNELS] fp32, or [R, ...] in the storage type
    weight_ptr,  # [NUM_CHANNELS, WIDTH], storage type
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    ring_ptr,  # [num_slots, RING, NUM_CHANNELS], storage type; written with IS_KEPT
    mixed_ptr,  # [R, NUM_CHANNELS], storage type, written
    scales_ptr,  # [R, 2 * NUM_KEY_HEADS] fp32, written
    num_rows,
    slice_stride,
    row_stride,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RING: tl.constexpr,
    IS_KEPT: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block, head): the channels of a head of queries, keys or values. Longer than other kernels by
    the arguments of a load."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1)
    has_length = head < 2 * NUM_KEY_HEADS
    value_head = head - 2 * NUM_KEY_HEADS
    first_value = 2 * NUM_KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
    first = tl.where(has_length, head * KEY_DIM, first_value)
    size = tl.where(has_length, KEY_DIM, VALUE_DIM)
    column = tl.arange(0, BLOCK)
    is_channel = column < size
    channel = first + column
    is_row = row < num_rows
    slot = tl.load(row_slot_ptr + row, mask=is_row, other=-1)
    position = tl.load(row_position_ptr + row, mask=is_row, other=0)
    x = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(WIDTH):
        before = row - (WIDTH - 1 - tap)
        earlier = position - (WIDTH - 1 - tap)
        is_before = is_row & (before >= 0)
        other_slot = tl.load(row_slot_ptr + before, mask=is_before, other=-1)
        other_position = tl.load(row_position_ptr + before, mask=is_before, other=-1)
        is_here = is_before & (slot >= 0) & (other_slot == slot) & (other_position == earlier)
        inputs = _load_rows(
            product_ptr,
            ring_ptr,
            before,
            slot,
            earlier,
            is_here,
            channel,
            is_channel,
            slice_stride,
            row_stride,
            NUM_CHANNELS,
            NUM_SLICES,
            RING,
        )
        weight = tl.load(weight_ptr + (channel * WIDTH + tap), mask=is_channel, other=0.0)
        weights = tl.broadcast_to(weight.to(tl.float32)[None, :], (BLOCK_ROWS, BLOCK))
        x = tl.fma(inputs.to(tl.float32), weights, x)
        if IS_KEPT:
            if tap == WIDTH - 1:
                place = slot.to(tl.int64) * RING + position % RING
                kept_ptrs = ring_ptr + (place[:, None] * NUM_CHANNELS + channel[None, :])
                tl.store(kept_ptrs, inputs, mask=(slot >= 0)[:, None] & is_channel[None, :])

    dtype = mixed_ptr.dtype.element_ty
    x = x.to(dtype).to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(dtype)
    tl.store(
        mixed_ptr + (row[:, None] * NUM_CHANNELS + channel[None, :]),
        x,
        mask=is_row[:, None] & is_channel[None, :],
    )
    if has_length:
        wide = x.to(tl.float32)
        length = tl.rsqrt(tl.sum(tl.where(is_channel[None, :], wide * wide, 0.0), axis=1) + EPS)
        scale = tl.where(head < NUM_KEY_HEADS, length * QUERY_SCALE, length)
        tl.store(scales_ptr + (row * (2 * NUM_KEY_HEADS) + head), scale, mask=is_row)


@kernel
def _keep_inputs(
    product_ptr,  # as of _mix_rows
    runs_ptr,  # [M, 4] int32
    places_ptr,  # int32: of checkpoints, see PromptRuns
    ring_ptr,  # [num_slots, RING, NUM_CHANNELS], storage type, read and written
    checkpoint_ptr,  # [P, KEPT, NUM_CHANNELS], storage type, written
    checkpoint_stride,
    slice_stride,
    row_stride,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED_KEPT: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RING: tl.constexpr,
    BORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (run, block): some channels of a run. All that it reads of the ring comes before it writes.

    Longer than most functions because the rows of checkpoints and of the ring are loaded alike.
    """
    wait_for_producers(PDL)
    start_dependents(PDL)
    run = tl.program_id(0)
    slot = tl.load(runs_ptr + run * 4)
    start = tl.load(runs_ptr + run * 4 + 1)
    first_row = tl.load(runs_ptr + run * 4 + 2)
    count = tl.load(runs_ptr + run * 4 + 3)
    if (slot >= 0) & (count > 0):
        channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        is_channel = channel < NUM_CHANNELS
        kept = tl.arange(0, PADDED_KEPT)
        is_kept = kept < KEPT
        slots = tl.where(is_kept, slot, -1)
        end = start + count
        next_border = (start // BORDER + 1) * BORDER
        num_borders = tl.maximum(end - next_border + BORDER, 0) // BORDER
        for number in range(num_borders):
            place = tl.load(places_ptr + first_row // BORDER + run + number)
            if place >= 0:
                position = next_border + number * BORDER - KEPT + kept
                row = (first_row + position - start).to(tl.int64)
                inputs = _load_rows(
                    product_ptr,
                    ring_ptr,
                    row,
                    slots,
                    position,
                    is_kept & (position >= start),
                    channel,
                    is_channel,
                    slice_stride,
                    row_stride,
                    NUM_CHANNELS,
                    NUM_SLICES,
                    RING,
                )
                to = place.to(tl.int64) * checkpoint_stride + kept[:, None] * NUM_CHANNELS + channel[None, :]
                tl.store(checkpoint_ptr + to, inputs, mask=is_kept[:, None] & is_channel[None, :])

        position = end - KEPT + kept
        inputs = _load_rows(
            product_ptr,
            ring_ptr,
            (first_row + position - start).to(tl.int64),
            slots,
            position,
            is_kept & (position >= start),
            channel,
            is_channel,
            slice_stride,
            row_stride,
            NUM_CHANNELS,
            NUM_SLICES,
            RING,
        )
        tl.debug_barrier()
        is_new = is_kept & (position >= start)
        place = slot.to(tl.int64) * RING + tl.where(is_new, position, 0) % RING
        tl.store(
            ring_ptr + (place[:, None] * NUM_CHANNELS + channel[None, :]),
            inputs,
            mask=is_new[:, None] & is_channel[None, :],
        )


def mix_rows(
    spec: GatedDelta,
    product: Tensor,
    weight: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    ring: Tensor,
    rows: MixedRows,
    *,
    is_kept: bool,
) -> None:
    """Fill `rows.mixed` and `rows.scales`; the latter are undefined for padding rows.

    product: [R, W] in the storage type, or fp32 partial sums [num_slices, R, W], with the channels first.
    weight [num_channels, 1, conv_width]. row_slot, row_position [R] int32; the rows of a slot follow one
    another. ring [S, rows, num_channels] in the storage type, to which the rows are added with `is_kept`: no
    slot may have more than `num_input_rows` allows. Raises ValueError for another shape, type or layout.
    """
    num_rows = row_slot.shape[0]
    slices = _check(spec, product, ring, num_rows)
    check_tensor("weight", weight, (spec.num_channels, 1, spec.conv_width), ring.dtype)
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("row_position", row_position, (num_rows,), torch.int32)
    check_tensor("mixed", rows.mixed, (num_rows, spec.num_channels), ring.dtype)
    check_tensor("scales", rows.scales, (num_rows, 2 * spec.num_key_heads), torch.float32)
    _mix_rows[(cdiv(num_rows, BLOCK_ROWS), 2 * spec.num_key_heads + spec.num_value_heads)](
        product_ptr=product,
        weight_ptr=weight,
        row_slot_ptr=row_slot,
        row_position_ptr=row_position,
        ring_ptr=ring,
        mixed_ptr=rows.mixed,
        scales_ptr=rows.scales,
        num_rows=num_rows,
        slice_stride=slices.slice_stride,
        row_stride=product.stride(-2),
        NUM_KEY_HEADS=spec.num_key_heads,
        KEY_DIM=spec.key_dim,
        VALUE_DIM=spec.value_dim,
        BLOCK=next_power_of_2(max(spec.key_dim, spec.value_dim)),
        BLOCK_ROWS=BLOCK_ROWS,
        NUM_CHANNELS=spec.num_channels,
        WIDTH=spec.conv_width,
        NUM_SLICES=slices.num_slices,
        RING=ring.shape[1],
        IS_KEPT=is_kept,
        QUERY_SCALE=spec.key_dim**-0.5,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


def keep_inputs(
    spec: GatedDelta, product: Tensor, runs: PromptRuns, ring: Tensor, checkpoints: Tensor
) -> None:
    """Add the last rows of each run to the ring of its slot, and the rows before each border that has a place
    to checkpoints [P, conv_width - 1, num_channels], whose first dimension may have any stride.

    product, ring: as for `mix_rows`. Raises ValueError for another shape, type or layout.
    """
    slices = _check(spec, product, ring, product.shape[-2])
    num_runs, kept = runs.runs.shape[0], spec.conv_width - 1
    check_tensor("runs", runs.runs, (num_runs, 4), torch.int32)
    check_tensor("places", runs.places, (product.shape[-2] // BORDER + num_runs + 1,), torch.int32)
    check_tensor("checkpoints", checkpoints[:1], (len(checkpoints[:1]), kept, spec.num_channels), ring.dtype)
    _keep_inputs[(num_runs, cdiv(spec.num_channels, BLOCK_CHANNELS))](
        product_ptr=product,
        runs_ptr=runs.runs,
        places_ptr=runs.places,
        ring_ptr=ring,
        checkpoint_ptr=checkpoints,
        checkpoint_stride=checkpoints.stride(0) if len(checkpoints) else 0,
        slice_stride=slices.slice_stride,
        row_stride=product.stride(-2),
        BLOCK_CHANNELS=BLOCK_CHANNELS,
        NUM_CHANNELS=spec.num_channels,
        KEPT=kept,
        PADDED_KEPT=next_power_of_2(kept),
        NUM_SLICES=slices.num_slices,
        RING=ring.shape[1],
        BORDER=BORDER,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


def _check(spec: GatedDelta, product: Tensor, ring: Tensor, num_rows: int) -> PartialSums:
    num_slots, num_kept, _ = ring.shape
    check_tensor("ring", ring, (num_slots, num_kept, spec.num_channels), ring.dtype)
    check_range("rows of the ring", num_kept, num_input_rows(spec, 1))
    check_range("columns of the product", product.shape[-1], spec.num_channels)
    return check_partial_sums("product", product, num_rows, product.shape[-1], ring.dtype)


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


BLOCK_HEADS, ROW_WARPS = 8, 4


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
        num_warps=ROW_WARPS,
        **launch_options(),
    )
