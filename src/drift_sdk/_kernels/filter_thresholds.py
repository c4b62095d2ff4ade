"""Where top_k, top_p and min_p cut a row's logits off: one threshold, found without sorting.

Reference: `sample.filter_logits`. A token stays while the weight of all strictly larger logits is below a
limit: their count below top_k, or their mass below top_p. Both fall as the logit grows, so a bracket around
the smallest logit kept is cut to a third by each pass over the row; it is closed once no logit lies inside.
After a few passes no more than some thousand logits are left to look at, as a rule, and these are set apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.gumbel import LEAST_NOISE, MOST_NOISE
from drift_sdk._kernels.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.ruled_logits import bans_stops, has_rules

__all__ = ["HOPELESS", "find_thresholds", "scale"]

FIRST_PASSES = tl.constexpr(2)
MAX_PASSES = tl.constexpr(2**30)

# So far below the best logit no noise lifts a token to the top: where in there a filter cuts is of no matter.
HOPELESS = tl.constexpr(LEAST_NOISE - MOST_NOISE - 0.1)


@triton.jit
def scale(logits, row_max, temperature):
    """Logits over the temperature, with the largest at zero."""
    # A bounded factor: at no temperature is it 0 * inf.
    return (logits - row_max) * (1.0 / tl.maximum(temperature, 1e-30))


@triton.jit
def _weigh(
    row_logits,
    vocab_size,
    row_max,
    temperature,
    low,
    middle,
    high,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weights of the scaled logits not below low, middle and high, and the largest logit below high."""
    low_weights = tl.zeros((BLOCK,), tl.float32)
    middle_weights = tl.zeros((BLOCK,), tl.float32)
    high_weights = tl.zeros((BLOCK,), tl.float32)
    lesser = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        token_ids = first + tl.arange(0, BLOCK)
        logits = tl.load(row_logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
        scaled = scale(logits, row_max, temperature)
        if IS_MASS:
            weights = tl.exp(scaled)
        else:
            weights = (token_ids < vocab_size).to(tl.float32)
        low_weights += tl.where(scaled >= low, weights, 0.0)
        middle_weights += tl.where(scaled >= middle, weights, 0.0)
        high_weights += tl.where(scaled >= high, weights, 0.0)
        lesser = tl.maximum(lesser, tl.where(scaled < high, scaled, -float("inf")))

    return tl.sum(low_weights), tl.sum(middle_weights), tl.sum(high_weights), tl.max(lesser)


@triton.jit
def _narrow(
    row_logits, vocab_size, row_max, temperature, low, high, limit, max_passes,
    IS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bracket (low, high), closer after some passes: of scaled logits all from high on are kept, and none
    below low unless low was so low already that none of those matters."""
    is_open = True
    num_passes = 0
    while is_open & (num_passes < max_passes):
        third = (high - low) * (1.0 / 3.0)
        lower, upper = low + third, high - third
        low_weight, middle_weight, high_weight, next_value = _weigh(
            row_logits, vocab_size, row_max, temperature, lower, upper, high, IS_MASS, BLOCK
        )
        # What lies above the next value is exactly what was weighed from high on.
        is_open = (high_weight < limit) & (next_value >= low)
        low = tl.where(middle_weight >= limit, upper, tl.where(low_weight >= limit, lower, low))
        kept = tl.where(low_weight < limit, lower, tl.where(middle_weight < limit, upper, high))
        high = tl.where(is_open, tl.minimum(next_value, kept), high)
        num_passes += 1

    return low, high


@triton.jit
def _gather(
    row_logits, vocab_size, row_max, temperature, low, survivors, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the scaled logits from `low` on to survivors [MOST]. Returns their number; beyond MOST it may be
    incomplete."""
    num_survivors = 0
    first = 0
    while (first < vocab_size) & (num_survivors <= MOST):
        token_ids = first + tl.arange(0, BLOCK)
        logits = tl.load(row_logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
        scaled = scale(logits, row_max, temperature)
        is_kept = (scaled >= low).to(tl.int32)
        place = num_survivors + tl.cumsum(is_kept, axis=0) - 1
        tl.store(survivors + place, scaled, mask=(is_kept != 0) & (place < MOST))
        num_survivors += tl.sum(is_kept, axis=0)
        first += BLOCK

    # Other threads read what these wrote.
    tl.debug_barrier()
    return num_survivors


@triton.jit
def _cut(row_logits, vocab_size, row_max, temperature, low, high, top_k, top_p, mass, BLOCK: tl.constexpr):
    """The threshold of top_k (0: off) and top_p, within a bracket of the first of them. `mass`: of all the
    row's logits, read when top_k is off."""
    threshold = -float("inf")
    if top_k > 0:
        limit = top_k.to(tl.float32)
        low, threshold = _narrow(
            row_logits, vocab_size, row_max, temperature, low, high, limit, MAX_PASSES, False, BLOCK
        )
        low, high = threshold, 0.0
        mass, _, _, _ = _weigh(row_logits, vocab_size, row_max, temperature, low, low, low, True, BLOCK)

    if top_p < 1:
        _, threshold = _narrow(
            row_logits, vocab_size, row_max, temperature, low, high, top_p * mass, MAX_PASSES, True, BLOCK
        )

    return threshold


@triton.jit
def find_thresholds(
    logits, plane_stride, row_slot, row_position,
    slot_temperature, slot_top_k, slot_top_p, slot_min_p, slot_flags, slot_min_length,
    chunk_value, survivors, row_max, row_threshold, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Writes row_max and row_threshold of rows that are not greedy: scaled logits below the
    threshold are cut off; -inf without filters. CHUNKS: num_chunks as a power of two;
    survivors [R, MOST] is scratch."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    if slot < 0:
        return

    temperature = tl.load(slot_temperature + slot)
    if temperature <= 0:
        return

    chunk = tl.arange(0, CHUNKS)
    values = tl.load(chunk_value + row * num_chunks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    best = tl.max(values, axis=0)
    best = tl.where(best == -float("inf"), 0.0, best)
    tl.store(row_max + row, best)

    is_short = bans_stops(
        tl.load(slot_flags + slot), tl.load(slot_min_length + slot), tl.load(row_position + row)
    )
    plane = has_rules(tl.load(slot_flags + slot), is_short).to(tl.int64)
    row_logits = logits + plane * plane_stride + row.to(tl.int64) * vocab_size
    threshold = -float("inf")
    top_k = tl.load(slot_top_k + slot)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = tl.load(slot_top_p + slot)
    if (top_k > 0) | (top_p < 1):
        low, high, mass = threshold, 0.0, 0.0
        if top_k > 0:
            low, high = _narrow(
                row_logits, vocab_size, best, temperature, HOPELESS + high, high, top_k.to(tl.float32),
                FIRST_PASSES, False, BLOCK,
            )  # fmt: skip
        else:
            mass, _, _, _ = _weigh(row_logits, vocab_size, best, temperature, low, high, high, True, BLOCK)
            low, high = _narrow(
                row_logits, vocab_size, best, temperature, HOPELESS + high, high, top_p * mass,
                FIRST_PASSES, True, BLOCK,
            )  # fmt: skip

        row_survivors = survivors + row.to(tl.int64) * MOST
        num_survivors = _gather(row_logits, vocab_size, best, temperature, low, row_survivors, MOST, BLOCK)
        if num_survivors <= MOST:
            threshold = _cut(row_survivors, num_survivors, 0.0, 1.0, low, high, top_k, top_p, mass, MOST)
        else:
            threshold = _cut(row_logits, vocab_size, best, temperature, low, high, top_k, top_p, mass, BLOCK)

    min_p = tl.load(slot_min_p + slot)
    if min_p > 0:
        threshold = tl.maximum(threshold, tl.log(min_p))

    tl.store(row_threshold + row, threshold)
