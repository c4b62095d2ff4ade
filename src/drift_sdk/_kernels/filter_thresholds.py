"""Where top_k, top_p and min_p cut a row's logits off: one threshold, found without sorting.

Reference: `sample.filter_logits`. A token stays while the weight of all strictly larger logits is below a
limit: their count below top_k, or their mass below top_p. Both fall as the logit grows, so a bracket around
the smallest logit kept is cut to a third by each pass over the row; it is closed once no logit lies inside.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.gumbel import LEAST_NOISE, MOST_NOISE
from drift_sdk._kernels.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.ruled_logits import bans_stops, has_rules

__all__ = ["HOPELESS", "find_thresholds", "scale"]

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
def _find_threshold(
    row_logits, vocab_size, row_max, temperature, floor, limit, IS_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """A number between the largest scaled logit below which none is kept and the smallest one that is; at
    least `floor`."""
    # All values from high on are kept, none below low.
    low, high = floor, 0.0
    is_open = True
    while is_open:
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

    return high


@triton.jit
def find_thresholds(
    logits, plane_stride, row_slot, row_position,
    slot_temperature, slot_top_k, slot_top_p, slot_min_p, slot_flags, slot_min_length,
    chunk_value, row_max, row_threshold, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Writes row_max and row_threshold of rows that are not greedy: scaled logits below the
    threshold are cut off; -inf without filters. CHUNKS: num_chunks as a power of two."""
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
    if (top_k > 0) & (top_k < vocab_size):
        threshold = _find_threshold(
            row_logits, vocab_size, best, temperature, HOPELESS, top_k.to(tl.float32), False, BLOCK
        )

    top_p = tl.load(slot_top_p + slot)
    if top_p < 1:
        mass, _, _, _ = _weigh(
            row_logits, vocab_size, best, temperature, threshold, threshold, threshold, True, BLOCK
        )
        floor = tl.maximum(threshold, HOPELESS)
        nucleus = _find_threshold(row_logits, vocab_size, best, temperature, floor, top_p * mass, True, BLOCK)
        threshold = tl.maximum(threshold, nucleus)

    min_p = tl.load(slot_min_p + slot)
    if min_p > 0:
        threshold = tl.maximum(threshold, tl.log(min_p))

    tl.store(row_threshold + row, threshold)
