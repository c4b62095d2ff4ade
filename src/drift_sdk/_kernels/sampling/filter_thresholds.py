"""Where top_k, top_p and min_p cut a row's logits off: one threshold, found without sorting.

Reference: `sample.filter_logits`. Of the logits that `filter_brackets` has set apart one program a row finds
the smallest that is kept: it cuts the bracket to a third, again and again, until it is empty. Where too many
were set apart it goes through the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.common.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.sampling.apply_logits_rules import ruled_row
from drift_sdk._kernels.sampling.filter_brackets import BRACKET, PASSES, filter_settings
from drift_sdk._kernels.sampling.scaled_logits import best_of_chunks, scale

__all__ = ["find_thresholds"]


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
def _close(
    row_logits, vocab_size, row_max, temperature, low, high, limit, IS_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest scaled logit kept, or `high`. In the bracket (low, high) lies what is in doubt: all from
    high on are kept, and none below low unless low was so low already that none of those matters."""
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
def _cut(
    row_logits, vocab_size, row_max, temperature, low, high, above, top_k, top_p, mass, BLOCK: tl.constexpr
):
    """The threshold of top_k (0: off) and top_p, within a bracket of the first of them. `mass`: of the whole
    row; `above`: what of it is not among these logits. Neither matters with top_k."""
    threshold = -float("inf")
    if top_k > 0:
        limit = top_k.to(tl.float32)
        threshold = _close(row_logits, vocab_size, row_max, temperature, low, high, limit, False, BLOCK)
        low, high, above = threshold, 0.0, 0.0
        mass, _, _, _ = _weigh(row_logits, vocab_size, row_max, temperature, low, low, low, True, BLOCK)

    if top_p < 1:
        limit = top_p * mass - above
        threshold = _close(row_logits, vocab_size, row_max, temperature, low, high, limit, True, BLOCK)

    return threshold


@triton.jit
def find_thresholds(
    logits, plane_stride, row_slot, row_position,
    slot_temperature, slot_top_k, slot_top_p, slot_flags, slot_min_length, chunk_value,
    slot_min_p, brackets, candidates, num_candidates, row_max, row_threshold, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Writes row_max and row_threshold of rows that are not greedy: scaled logits below the
    threshold are cut off; -inf without filters. CHUNKS: num_chunks as a power of two."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    temperature, top_k, top_p, is_cut = filter_settings(
        slot_temperature, slot_top_k, slot_top_p, slot, vocab_size
    )
    if temperature <= 0:
        return

    best = best_of_chunks(chunk_value, row, num_chunks, CHUNKS)
    tl.store(row_max + row, best)
    threshold = -float("inf")
    if is_cut:
        bracket = brackets + (row * (PASSES + 1) + PASSES) * BRACKET
        low, high = tl.load(bracket), tl.load(bracket + 1)
        above, mass = tl.load(bracket + 2), tl.load(bracket + 3)
        chunk = tl.arange(0, CHUNKS)
        numbers = tl.load(num_candidates + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
        values, num_values = candidates + row.to(tl.int64) * num_chunks * MOST, num_chunks * MOST
        largest, divisor = 0.0, 1.0  # candidates are scaled
        if tl.max(numbers, axis=0) > MOST:
            values = ruled_row(
                logits, plane_stride, row_position, slot_flags, slot_min_length, row, slot, vocab_size
            )
            num_values, largest, divisor, above = vocab_size, best, temperature, 0.0
        threshold = _cut(values, num_values, largest, divisor, low, high, above, top_k, top_p, mass, BLOCK)

    min_p = tl.load(slot_min_p + slot)
    if min_p > 0:
        threshold = tl.maximum(threshold, tl.log(min_p))

    tl.store(row_threshold + row, threshold)
