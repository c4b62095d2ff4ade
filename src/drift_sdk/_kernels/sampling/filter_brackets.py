"""Between which two levels a row's logits are cut off by top_k or top_p, and the logits that lie there.

A token stays while the weight of all strictly larger logits is below a limit: their count below top_k, or
their mass below top_p. Both fall as the logit grows, so weighing the row at a few levels tells between which
two of them the smallest logit kept lies. All chunks of a row do so side by side, in two passes, and then set
apart what lies in there: from a few to some thousand.

Bytes: a row of logits three times, less the chunks whose best lies below the bracket.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.common.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.sampling.apply_logits_rules import ruled_row
from drift_sdk._kernels.sampling.scaled_logits import NEGLIGIBLE_LOGIT, best_of_chunks, mass_of_chunks, scale

__all__ = ["BRACKET", "LEVELS", "PASSES", "collect_candidates", "filter_settings", "refine_bracket"]

PASSES = tl.constexpr(2)
LEVELS = tl.constexpr(7)
"""Levels within the bracket at which a pass weighs the row: what is left of a bracket after two passes, a
64th, holds less than `MAX_CANDIDATES` of a chunk as a rule, also where thousands of tokens are about as
likely."""
BRACKET = tl.constexpr(4)
"""What is noted of a bracket: its low and high end, the weight of all from the high end on and, without
top_k, the mass of the whole row."""


@triton.jit
def filter_settings(slot_temperature, slot_top_k, slot_top_p, slot, vocab_size):
    """(temperature, top_k or 0 if it cuts nothing off, top_p, whether a row is sampled through a filter that
    needs an order) of a slot, -1: none."""
    is_slot = slot >= 0
    temperature = tl.load(slot_temperature + slot, mask=is_slot, other=0.0)
    top_k = tl.load(slot_top_k + slot, mask=is_slot, other=0)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = tl.load(slot_top_p + slot, mask=is_slot, other=1.0)
    return temperature, top_k, top_p, (temperature > 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _level(low, high, number: tl.constexpr):
    # Rounded twice in every launch (no fused multiply-add), so that all mean the same level.
    return low + (high - low) * ((number + 1) / (LEVELS + 1))


@triton.jit
def _bracket(
    brackets, weights, chunk_value, chunk_mass, row, best, temperature, top_k, top_p, vocab_size, num_chunks,
    PASS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """(low, high) of what is in doubt before a pass: of scaled logits all from high on are kept, and none
    below low, unless low was so low already that none of those matters."""
    if PASS == 0:
        # Nothing lies above the best, which is zero.
        low, high, above, mass = NEGLIGIBLE_LOGIT + 0.0, 1e-30, 0.0, 0.0
        if top_k == 0:
            mass = mass_of_chunks(chunk_value, chunk_mass, row, best, temperature, num_chunks, CHUNKS)
            # All tokens below this have less mass together than top_p leaves out; the tenth is for rounding.
            left_out = tl.maximum((mass - top_p * mass) / vocab_size, 1e-30)
            low = tl.maximum(tl.log(left_out) - 0.1, NEGLIGIBLE_LOGIT)
    else:
        last = brackets + (row * (PASSES + 1) + PASS - 1) * BRACKET
        low, high, above, mass = tl.load(last), tl.load(last + 1), tl.load(last + 2), tl.load(last + 3)
        limit = tl.where(top_k > 0, top_k.to(tl.float32), top_p * mass)
        chunk = tl.arange(0, CHUNKS)
        cell = weights + ((row * PASSES + PASS - 1) * num_chunks + chunk) * LEVELS
        from_low, from_high = low, high
        for number in tl.static_range(LEVELS):
            level = _level(from_low, from_high, number)
            weight = tl.sum(tl.load(cell + number, mask=chunk < num_chunks, other=0.0), axis=0)
            low = tl.where(weight >= limit, level, low)
            # The first level whose weight is below the limit.
            is_end = (weight < limit) & (high == from_high)
            high, above = tl.where(is_end, level, high), tl.where(is_end, weight, above)

    if tl.program_id(1) == 0:
        own = brackets + (row * (PASSES + 1) + PASS) * BRACKET
        tl.store(own, low)
        tl.store(own + 1, high)
        tl.store(own + 2, above)
        tl.store(own + 3, mass)

    return low, high


@triton.jit
def refine_bracket(
    logits, plane_stride, row_slot, row_position,
    slot_temperature, slot_top_k, slot_top_p, slot_flags, slot_min_length,
    chunk_value, chunk_mass, brackets, weights, vocab_size, num_chunks,
    PASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of its chunks). The bracket before this pass, and each chunk's weight from the levels
    in it on. brackets [R, PASSES + 1, BRACKET]; weights [R, PASSES, num_chunks, LEVELS]."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    temperature, top_k, top_p, is_cut = filter_settings(
        slot_temperature, slot_top_k, slot_top_p, slot, vocab_size
    )
    if is_cut:
        best = best_of_chunks(chunk_value, row, num_chunks, CHUNKS)
        low, high = _bracket(
            brackets, weights, chunk_value, chunk_mass, row, best, temperature, top_k, top_p, vocab_size,
            num_chunks, PASS, CHUNKS,
        )  # fmt: skip
        row_logits = ruled_row(
            logits, plane_stride, row_position, slot_flags, slot_min_length, row, slot, vocab_size
        )
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            cell = weights + ((row * PASSES + PASS) * num_chunks + chunk) * LEVELS
            chunk_best = scale(tl.load(chunk_value + row * num_chunks + chunk), best, temperature)
            if chunk_best >= _level(low, high, 0):
                token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
                values = tl.load(row_logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
                scaled = scale(values, best, temperature)
                weight = tl.where(top_k > 0, 1.0, tl.exp(scaled))
                for number in tl.static_range(LEVELS):
                    is_counted = scaled >= _level(low, high, number)
                    tl.store(cell + number, tl.sum(tl.where(is_counted, weight, 0.0), axis=0))
            else:
                for number in tl.static_range(LEVELS):
                    tl.store(cell + number, 0.0)


@triton.jit
def collect_candidates(
    logits, plane_stride, row_slot, row_position,
    slot_temperature, slot_top_k, slot_top_p, slot_flags, slot_min_length,
    chunk_value, chunk_mass, brackets, weights, candidates, num_candidates, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of its chunks). The last bracket, and each chunk's scaled logits in it, with top_k
    also those above: candidates [R, num_chunks, MOST], filled up with -inf; num_candidates [R, num_chunks]
    may be more than MOST."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    temperature, top_k, top_p, is_cut = filter_settings(
        slot_temperature, slot_top_k, slot_top_p, slot, vocab_size
    )
    if is_cut:
        best = best_of_chunks(chunk_value, row, num_chunks, CHUNKS)
        low, high = _bracket(
            brackets, weights, chunk_value, chunk_mass, row, best, temperature, top_k, top_p, vocab_size,
            num_chunks, PASSES, CHUNKS,
        )  # fmt: skip
        end = tl.where(top_k > 0, float("inf"), high)
        row_logits = ruled_row(
            logits, plane_stride, row_position, slot_flags, slot_min_length, row, slot, vocab_size
        )
        place = tl.arange(0, MOST)
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            cell = row * num_chunks + chunk
            chunk_candidates = candidates + cell.to(tl.int64) * MOST
            number = 0
            if scale(tl.load(chunk_value + cell), best, temperature) >= low:
                token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
                values = tl.load(row_logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
                scaled = scale(values, best, temperature)
                is_doubtful = (scaled >= low) & (scaled < end)
                last = tl.cumsum(is_doubtful.to(tl.int32), axis=0)
                tl.store(chunk_candidates + last - 1, scaled, mask=is_doubtful & (last <= MOST))
                number = tl.sum(is_doubtful.to(tl.int32), axis=0)

            tl.store(chunk_candidates + place, -float("inf"), mask=place >= number)
            tl.store(num_candidates + cell, number)
