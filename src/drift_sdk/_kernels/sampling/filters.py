"""Filters: where top_k, top_p and min_p cut a row's logits off, found without sorting.

Brackets around the levels where top_k or top_p cut rows off, and the logits that lie in them.

A token stays while the weight of all strictly larger logits is below a limit: their count is below top_k, or
their mass below top_p of the row's. Both fall as the logit grows, so weighing the row at a few levels tells
between which two of them the smallest logit kept lies: that is the bracket. All chunks of a row are weighed
side by side, in two passes (`_refine_bracket`); then the scaled logits in the last bracket are collected
(`_collect_candidates`): from a few to some thousand. With top_k those above the bracket are collected too,
for a top_p that comes after it.

Grid (rows, parts) of both: a program owns every P-th chunk of its row. Every program of a row computes the
bracket again, from the weights that the launch before has left, by the same operations in the same order, so
all agree on it to the bit; without fused multiply-adds, which one kernel might have and another not. Program
0 of a row writes it down. A weight is the sum over one chunk, then over the row's chunks, in the order of
Triton's reductions, which CHUNK_TOKENS, the number of chunks and the 4 warps fix.

Bytes: a row of logits three times, less the chunks whose best lies below the bracket.

Programmatic dependent launch: the kernels wait for their producers before their first read and let their
dependents start right after that: rows without a filter end at once.

Reference: `eager.sampling.filter_logits`, together with `_find_thresholds`.

The threshold where top_k, top_p and min_p cut a row's logits off, found without sorting.

Of the logits that `collect_candidates` has collected, `_find_thresholds` finds the smallest that is kept: it
cuts the bracket to a third, again and again, until no logit is left in it. Where more than MAX_CANDIDATES of
a chunk were collected it reads the whole row instead. min_p is a threshold by itself; the larger
holds.

Grid (rows,): a program owns a row. Weights are summed lane by lane over chunks of CHUNK_VALUES in rising
order of tokens, then over the lanes in the order of Triton's reduction, which CHUNK_VALUES and the 8 warps
fix. So a weight that is computed again is the same number.

Bytes: MAX_CANDIDATES logits a chunk in each round, from L1 and L2; where these were too many, the whole row.

Programmatic dependent launch: the kernel waits for its producers before its first read and lets its
dependents start right after that: greedy rows end at once.

Reference: `eager.sampling.filter_logits`.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.logits import (
    NEGLIGIBLE_LOGIT,
    best_of_chunks,
    find_ruled_row,
    mass_of_chunks,
    scale,
)
from drift_sdk._kernels.sampling.rows import (
    BRACKET_FIELDS,
    CHUNK_TOKENS,
    LEVELS,
    MAX_CANDIDATES,
    PASSES,
    RowsToSample,
    load_filter,
)

FIRST_HIGH = tl.constexpr(1e-30)
"""High end of the first bracket: above the best scaled logit, 0, which must lie in the bracket."""
LEAST_LEFT_OUT = tl.constexpr(1e-30)
"""Least mass a token that top_p leaves out is taken to have, so that its logarithm is finite: about -69, far
below NEGLIGIBLE_LOGIT."""
ROUNDING_MARGIN = tl.constexpr(0.1)
"""The first bracket of top_p begins this far below its computed low end, for rounding: far more than the
rounding of the sums, and little beside the width of the bracket."""


@device_function
def _level(low, high, number: tl.constexpr):
    """Level `number` of a pass: level 0 to LEVELS - 1 cut the bracket into LEVELS + 1 equal parts."""
    # Rounded twice in every launch (no fused multiply-add), so that all mean the same level.
    return low + (high - low) * ((number + 1) / (LEVELS + 1))


@device_function
def _find_bracket(
    brackets_ptr,  # [R, PASSES + 1, BRACKET_FIELDS] fp32: read at PASS - 1, written at PASS
    weights_ptr,  # [R, PASSES, C, LEVELS] fp32: read at PASS - 1
    chunk_value_ptr,  # [R, C] fp32
    chunk_mass_ptr,  # [R, C] fp32
    row,
    best,  # of the row
    temperature,
    top_k,
    top_p,
    vocab_size,
    num_chunks,  # C
    PASS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """(low, high): the bracket before a pass. All scaled logits from high on are kept, and none below low,
    unless low was so low already that none of those can be chosen."""
    if PASS == 0:
        # Nothing lies above the best, which is zero.
        low, high, above, mass = NEGLIGIBLE_LOGIT + 0.0, FIRST_HIGH + 0.0, 0.0, 0.0
        if top_k == 0:
            mass = mass_of_chunks(
                chunk_value_ptr, chunk_mass_ptr, row, best, temperature, num_chunks, PADDED_CHUNKS
            )
            # All tokens below this have less mass together than top_p leaves out.
            left_out = tl.maximum((mass - top_p * mass) / vocab_size, LEAST_LEFT_OUT)
            low = tl.maximum(tl.log(left_out) - ROUNDING_MARGIN, NEGLIGIBLE_LOGIT)
    else:
        last_ptr = brackets_ptr + (row * (PASSES + 1) + PASS - 1) * BRACKET_FIELDS
        low, high, above, mass = (
            tl.load(last_ptr),
            tl.load(last_ptr + 1),
            tl.load(last_ptr + 2),
            tl.load(last_ptr + 3),
        )
        limit = tl.where(top_k > 0, top_k.to(tl.float32), top_p * mass)
        chunk = tl.arange(0, PADDED_CHUNKS)
        is_chunk = chunk < num_chunks
        chunk_weights_ptr = weights_ptr + ((row * PASSES + PASS - 1) * num_chunks + chunk) * LEVELS
        from_low, from_high = low, high
        for number in tl.static_range(LEVELS):
            level = _level(from_low, from_high, number)
            weight = tl.sum(tl.load(chunk_weights_ptr + number, mask=is_chunk, other=0.0), axis=0)
            low = tl.where(weight >= limit, level, low)
            # The first level whose weight is below the limit.
            is_end = (weight < limit) & (high == from_high)
            high, above = tl.where(is_end, level, high), tl.where(is_end, weight, above)

    if tl.program_id(1) == 0:
        bracket_ptr = brackets_ptr + (row * (PASSES + 1) + PASS) * BRACKET_FIELDS
        tl.store(bracket_ptr, low)
        tl.store(bracket_ptr + 1, high)
        tl.store(bracket_ptr + 2, above)
        tl.store(bracket_ptr + 3, mass)

    return low, high


@kernel
def _refine_bracket(
    # The rows.
    logits_ptr,  # [2, R, V] fp32
    logits_plane_stride,
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    # The slots.
    temperature_ptr,  # [S] fp32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] fp32
    flags_ptr,  # [S] int32
    min_length_ptr,  # [S] int32
    # The buffers.
    chunk_value_ptr,  # [R, C] fp32
    chunk_mass_ptr,  # [R, C] fp32
    brackets_ptr,  # [R, PASSES + 1, BRACKET_FIELDS] fp32: read at PASS - 1, written at PASS
    weights_ptr,  # [R, PASSES, C, LEVELS] fp32: read at PASS - 1, written at PASS
    # Sizes.
    vocab_size,  # V
    num_chunks,  # C
    PASS: tl.constexpr,  # 0 to PASSES - 1
    CHUNK_TOKENS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, P). The bracket before this pass, and each chunk's weight from each of its levels on."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    temperature, top_k, top_p, is_cut = load_filter(temperature_ptr, top_k_ptr, top_p_ptr, slot, vocab_size)
    if is_cut:
        best = best_of_chunks(chunk_value_ptr, row, num_chunks, PADDED_CHUNKS)
        low, high = _find_bracket(
            brackets_ptr,
            weights_ptr,
            chunk_value_ptr,
            chunk_mass_ptr,
            row,
            best,
            temperature,
            top_k,
            top_p,
            vocab_size,
            num_chunks,
            PASS,
            PADDED_CHUNKS,
        )
        row_logits_ptr = find_ruled_row(
            logits_ptr,
            logits_plane_stride,
            row_position_ptr,
            flags_ptr,
            min_length_ptr,
            row,
            slot,
            vocab_size,
        )
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            chunk_weights_ptr = weights_ptr + ((row * PASSES + PASS) * num_chunks + chunk) * LEVELS
            chunk_best = scale(tl.load(chunk_value_ptr + row * num_chunks + chunk), best, temperature)
            if chunk_best >= _level(low, high, 0):
                token_ids = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
                in_vocab = token_ids < vocab_size
                logits = tl.load(row_logits_ptr + token_ids, mask=in_vocab, other=-float("inf"))
                scaled = scale(logits, best, temperature)
                weight = tl.where(top_k > 0, 1.0, tl.exp(scaled))
                for number in tl.static_range(LEVELS):
                    is_counted = scaled >= _level(low, high, number)
                    tl.store(chunk_weights_ptr + number, tl.sum(tl.where(is_counted, weight, 0.0), axis=0))
            else:
                for number in tl.static_range(LEVELS):
                    tl.store(chunk_weights_ptr + number, 0.0)


@kernel
def _collect_candidates(
    # The rows.
    logits_ptr,  # [2, R, V] fp32
    logits_plane_stride,
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    # The slots.
    temperature_ptr,  # [S] fp32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] fp32
    flags_ptr,  # [S] int32
    min_length_ptr,  # [S] int32
    # The buffers.
    chunk_value_ptr,  # [R, C] fp32
    chunk_mass_ptr,  # [R, C] fp32
    brackets_ptr,  # [R, PASSES + 1, BRACKET_FIELDS] fp32: read at PASSES - 1, written at PASSES
    weights_ptr,  # [R, PASSES, C, LEVELS] fp32: read at PASSES - 1
    candidates_ptr,  # [R, C, MAX_CANDIDATES] fp32, written
    num_candidates_ptr,  # [R, C] int32, written
    # Sizes.
    vocab_size,  # V
    num_chunks,  # C
    CHUNK_TOKENS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, P). The last bracket; and each chunk's scaled logits in it, with top_k also those above,
    filled up with -inf. The number of candidates may be more than MAX_CANDIDATES: the first so many are
    stored."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    temperature, top_k, top_p, is_cut = load_filter(temperature_ptr, top_k_ptr, top_p_ptr, slot, vocab_size)
    if is_cut:
        best = best_of_chunks(chunk_value_ptr, row, num_chunks, PADDED_CHUNKS)
        low, high = _find_bracket(
            brackets_ptr,
            weights_ptr,
            chunk_value_ptr,
            chunk_mass_ptr,
            row,
            best,
            temperature,
            top_k,
            top_p,
            vocab_size,
            num_chunks,
            PASSES,
            PADDED_CHUNKS,
        )
        end = tl.where(top_k > 0, float("inf"), high)
        row_logits_ptr = find_ruled_row(
            logits_ptr,
            logits_plane_stride,
            row_position_ptr,
            flags_ptr,
            min_length_ptr,
            row,
            slot,
            vocab_size,
        )
        place = tl.arange(0, MAX_CANDIDATES)
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            cell = row * num_chunks + chunk
            chunk_candidates_ptr = candidates_ptr + cell.to(tl.int64) * MAX_CANDIDATES
            num_found = 0
            if scale(tl.load(chunk_value_ptr + cell), best, temperature) >= low:
                token_ids = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
                in_vocab = token_ids < vocab_size
                logits = tl.load(row_logits_ptr + token_ids, mask=in_vocab, other=-float("inf"))
                scaled = scale(logits, best, temperature)
                is_candidate = (scaled >= low) & (scaled < end)
                rank = tl.cumsum(is_candidate.to(tl.int32), axis=0)  # from 1 on
                is_stored = is_candidate & (rank <= MAX_CANDIDATES)
                tl.store(chunk_candidates_ptr + rank - 1, scaled, mask=is_stored)
                num_found = tl.sum(is_candidate.to(tl.int32), axis=0)

            tl.store(chunk_candidates_ptr + place, -float("inf"), mask=place >= num_found)
            tl.store(num_candidates_ptr + cell, num_found)


def refine_brackets(rows: RowsToSample) -> None:
    """Write the brackets before each pass, and the weights of each pass: PASSES launches."""
    for number in range(PASSES.value):
        _refine_bracket[rows.part_grid](
            rows.logits,
            rows.logits.stride(0),
            rows.row_slot,
            rows.row_position,
            rows.slots.temperature,
            rows.slots.top_k,
            rows.slots.top_p,
            rows.slots.flags,
            rows.slots.min_length,
            rows.buffers.chunk_value,
            rows.buffers.chunk_mass,
            rows.buffers.brackets,
            rows.buffers.weights,
            rows.vocab_size,
            rows.num_chunks,
            PASS=number,
            CHUNK_TOKENS=CHUNK_TOKENS,
            PADDED_CHUNKS=rows.padded_chunks,
            PDL=uses_pdl(),
            num_warps=4,
            enable_fp_fusion=False,  # a bracket's levels are computed again in each launch
            **launch_options(),
        )


def collect_candidates(rows: RowsToSample) -> None:
    """Write the last bracket, and the logits that lie in it: candidates, num_candidates."""
    _collect_candidates[rows.part_grid](
        rows.logits,
        rows.logits.stride(0),
        rows.row_slot,
        rows.row_position,
        rows.slots.temperature,
        rows.slots.top_k,
        rows.slots.top_p,
        rows.slots.flags,
        rows.slots.min_length,
        rows.buffers.chunk_value,
        rows.buffers.chunk_mass,
        rows.buffers.brackets,
        rows.buffers.weights,
        rows.buffers.candidates,
        rows.buffers.num_candidates,
        rows.vocab_size,
        rows.num_chunks,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PADDED_CHUNKS=rows.padded_chunks,
        MAX_CANDIDATES=MAX_CANDIDATES,
        PDL=uses_pdl(),
        num_warps=4,
        enable_fp_fusion=False,  # a bracket's levels are computed again in each launch
        **launch_options(),
    )


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
