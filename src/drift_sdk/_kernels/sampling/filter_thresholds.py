"""The threshold where top_k, top_p and min_p cut a row's logits off, found without sorting.

Of the logits that `filter_brackets` has collected, `_find_thresholds` finds the smallest that is kept: it
cuts the bracket to a third, again and again, until no logit is left in it. Where more than MAX_CANDIDATES of
a chunk were collected it reads the whole row instead. min_p is a threshold by itself; the larger
holds.

Grid (rows,): a program owns a row. Weights are summed lane by lane over chunks of CHUNK_VALUES in rising
order of tokens, then over the lanes in the order of Triton's reduction, which CHUNK_VALUES and the 8 warps
fix. So a weight that is computed again is the same number.

Bytes: MAX_CANDIDATES logits a chunk in each round, from L1 and L2; where these were too many, the whole row.

Programmatic dependent launch: the kernel waits for its producers before its first read and lets its
dependents start right after that: greedy rows end at once.

Reference: `sample.filter_logits`.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.sampling.apply_logits_rules import find_ruled_row
from drift_sdk._kernels.sampling.filter_settings import BRACKET_FIELDS, PASSES, load_filter
from drift_sdk._kernels.sampling.rows_to_sample import RowsToSample
from drift_sdk._kernels.sampling.sample_buffers import MAX_CANDIDATES
from drift_sdk._kernels.sampling.scaled_logits import best_of_chunks, scale

__all__ = ["find_thresholds"]

CHUNK_VALUES = 8192
"""Logits a program, which has a row to itself, weighs at a time: 32 a thread of 8 warps."""


@device_function
def _weigh(
    values_ptr,  # [N] fp32: logits
    num_values,  # N
    row_max,
    temperature,
    low,
    middle,
    high,
    IS_MASS: tl.constexpr,  # weights are exp(scaled logits), else 1
    CHUNK_VALUES: tl.constexpr,
):
    """The weights of the scaled logits not below low, middle and high, and the largest logit below high."""
    low_weights = tl.zeros((CHUNK_VALUES,), tl.float32)
    middle_weights = tl.zeros((CHUNK_VALUES,), tl.float32)
    high_weights = tl.zeros((CHUNK_VALUES,), tl.float32)
    lesser = tl.full((CHUNK_VALUES,), -float("inf"), tl.float32)
    for first in range(0, num_values, CHUNK_VALUES):
        index = first + tl.arange(0, CHUNK_VALUES)
        is_value = index < num_values
        logits = tl.load(values_ptr + index, mask=is_value, other=-float("inf"))
        scaled = scale(logits, row_max, temperature)
        if IS_MASS:
            weights = tl.exp(scaled)
        else:
            weights = is_value.to(tl.float32)
        low_weights += tl.where(scaled >= low, weights, 0.0)
        middle_weights += tl.where(scaled >= middle, weights, 0.0)
        high_weights += tl.where(scaled >= high, weights, 0.0)
        lesser = tl.maximum(lesser, tl.where(scaled < high, scaled, -float("inf")))

    return tl.sum(low_weights), tl.sum(middle_weights), tl.sum(high_weights), tl.max(lesser)


@device_function
def _close_bracket(
    values_ptr,  # [N] fp32: logits
    num_values,  # N
    row_max,
    temperature,
    low,
    high,
    limit,
    IS_MASS: tl.constexpr,  # the limit is one of mass, else of count
    CHUNK_VALUES: tl.constexpr,
):
    """The smallest scaled logit kept, or `high`. In the bracket (low, high) lie the logits in doubt: all from
    high on are kept, and none below low, unless low was so low already that none of those can be chosen."""
    is_open = True
    while is_open:
        third = (high - low) * (1.0 / 3.0)
        lower, upper = low + third, high - third
        low_weight, middle_weight, high_weight, next_value = _weigh(
            values_ptr, num_values, row_max, temperature, lower, upper, high, IS_MASS, CHUNK_VALUES
        )
        # What lies above the next value is exactly what was weighed from high on.
        is_open = (high_weight < limit) & (next_value >= low)
        low = tl.where(middle_weight >= limit, upper, tl.where(low_weight >= limit, lower, low))
        kept = tl.where(low_weight < limit, lower, tl.where(middle_weight < limit, upper, high))
        high = tl.where(is_open, tl.minimum(next_value, kept), high)

    return high


@device_function
def _find_threshold(
    values_ptr,  # [N] fp32: logits
    num_values,  # N
    row_max,
    temperature,
    low,
    high,
    above,  # weight of the row that is not among these logits; not used with top_k
    top_k,  # 0: off
    top_p,
    mass,  # of the whole row; not used with top_k
    CHUNK_VALUES: tl.constexpr,
):
    """The threshold of top_k, then of top_p, within a bracket (low, high) of the first of them."""
    threshold = -float("inf")
    if top_k > 0:
        limit = top_k.to(tl.float32)
        threshold = _close_bracket(
            values_ptr, num_values, row_max, temperature, low, high, limit, False, CHUNK_VALUES
        )
        # top_p is then a share of what top_k has kept.
        low, high, above = threshold, 0.0, 0.0
        mass, _, _, _ = _weigh(
            values_ptr, num_values, row_max, temperature, low, low, low, True, CHUNK_VALUES
        )

    if top_p < 1:
        limit = top_p * mass - above
        threshold = _close_bracket(
            values_ptr, num_values, row_max, temperature, low, high, limit, True, CHUNK_VALUES
        )

    return threshold


@kernel
def _find_thresholds(
    # The rows.
    logits_ptr,  # [2, R, V] fp32
    logits_plane_stride,
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    # The slots.
    temperature_ptr,  # [S] fp32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] fp32
    min_p_ptr,  # [S] fp32
    flags_ptr,  # [S] int32
    min_length_ptr,  # [S] int32
    # The buffers.
    chunk_value_ptr,  # [R, C] fp32
    brackets_ptr,  # [R, PASSES + 1, BRACKET_FIELDS] fp32
    candidates_ptr,  # [R, C, MAX_CANDIDATES] fp32
    num_candidates_ptr,  # [R, C] int32
    row_max_ptr,  # [R] fp32, written
    row_threshold_ptr,  # [R] fp32, written
    # Sizes.
    vocab_size,  # V
    num_chunks,  # C
    PADDED_CHUNKS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    CHUNK_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). Greedy rows and padding are not written."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    temperature, top_k, top_p, is_cut = load_filter(temperature_ptr, top_k_ptr, top_p_ptr, slot, vocab_size)
    if temperature <= 0:
        return

    best = best_of_chunks(chunk_value_ptr, row, num_chunks, PADDED_CHUNKS)
    tl.store(row_max_ptr + row, best)
    threshold = -float("inf")
    if is_cut:
        bracket_ptr = brackets_ptr + (row * (PASSES + 1) + PASSES) * BRACKET_FIELDS
        low, high = tl.load(bracket_ptr), tl.load(bracket_ptr + 1)
        above, mass = tl.load(bracket_ptr + 2), tl.load(bracket_ptr + 3)
        chunk = tl.arange(0, PADDED_CHUNKS)
        is_chunk = chunk < num_chunks
        numbers = tl.load(num_candidates_ptr + row * num_chunks + chunk, mask=is_chunk, other=0)
        values_ptr = candidates_ptr + row.to(tl.int64) * num_chunks * MAX_CANDIDATES
        num_values = num_chunks * MAX_CANDIDATES
        largest, divisor = 0.0, 1.0  # candidates are scaled
        if tl.max(numbers, axis=0) > MAX_CANDIDATES:
            values_ptr = find_ruled_row(
                logits_ptr,
                logits_plane_stride,
                row_position_ptr,
                flags_ptr,
                min_length_ptr,
                row,
                slot,
                vocab_size,
            )
            num_values, largest, divisor, above = vocab_size, best, temperature, 0.0
        threshold = _find_threshold(
            values_ptr, num_values, largest, divisor, low, high, above, top_k, top_p, mass, CHUNK_VALUES
        )

    min_p = tl.load(min_p_ptr + slot)
    if min_p > 0:
        threshold = tl.maximum(threshold, tl.log(min_p))

    tl.store(row_threshold_ptr + row, threshold)


def find_thresholds(rows: RowsToSample) -> None:
    """Write row_max and row_threshold of rows that are not greedy: scaled logits below the threshold are cut
    off; -inf without filters."""
    _find_thresholds[rows.row_grid](
        rows.logits,
        rows.logits.stride(0),
        rows.row_slot,
        rows.row_position,
        rows.slots.temperature,
        rows.slots.top_k,
        rows.slots.top_p,
        rows.slots.min_p,
        rows.slots.flags,
        rows.slots.min_length,
        rows.buffers.chunk_value,
        rows.buffers.brackets,
        rows.buffers.candidates,
        rows.buffers.num_candidates,
        rows.buffers.row_max,
        rows.buffers.row_threshold,
        rows.vocab_size,
        rows.num_chunks,
        PADDED_CHUNKS=rows.padded_chunks,
        MAX_CANDIDATES=MAX_CANDIDATES,
        CHUNK_VALUES=CHUNK_VALUES,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )
