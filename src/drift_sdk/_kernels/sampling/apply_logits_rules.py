"""Logits as their slot's rules change them, and the best of each chunk of them.

Reference: `apply_processors`, over the operations of penalties.py. Bytes: a row of logits once, and once
more to write it where rules apply. The vocabulary is cut into chunks, a program each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.common.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.sampling.gumbel import arg_max
from drift_sdk._kernels.sampling.scaled_logits import scale
from drift_sdk._kernels.slots.slot_columns import SlotFlag

__all__ = ["rule_logits", "ruled_row"]

BIAS = tl.constexpr(SlotFlag.BIAS.value)
PENALTIES = tl.constexpr(SlotFlag.PENALTIES.value)
ALLOWED = tl.constexpr(SlotFlag.ALLOWED.value)
CONSTRAINT = tl.constexpr(SlotFlag.CONSTRAINT.value)
STOPS = tl.constexpr(SlotFlag.STOPS.value)

WORD_BLOCK = tl.constexpr(1024)


@triton.jit
def _bans_stops(flags, min_length, position):
    """Whether stop ids are out of the question behind the token at `position`."""
    return ((flags & STOPS) != 0) & (position + 1 < min_length)


@triton.jit
def _has_rules(flags, is_short):
    """Whether a row's logits are in the second plane, changed."""
    return ((flags & (BIAS | PENALTIES | ALLOWED | CONSTRAINT)) != 0) | is_short


@triton.jit
def ruled_row(logits, plane_stride, row_position, slot_flags, slot_min_length, row, slot, vocab_size):
    """Where a row's logits are, rules and all."""
    flags = tl.load(slot_flags + slot)
    is_short = _bans_stops(flags, tl.load(slot_min_length + slot), tl.load(row_position + row))
    plane = _has_rules(flags, is_short).to(tl.int64)
    return logits + plane * plane_stride + row.to(tl.int64) * vocab_size


@triton.jit
def _bits(words, token_ids, in_vocab):
    word = tl.load(words + token_ids // 32, mask=in_vocab, other=0)
    return ((word >> (token_ids % 32)) & 1) != 0


@triton.jit
def _leaves_any(stop_words, allowed_words, mask_words, is_short, is_restricted, is_constrained, vocab_size):
    """Whether any token is left when stop ids are banned (is_short), the allowed ids and the constraint hold
    (is_restricted, is_constrained)."""
    num_words = (vocab_size + 31) // 32
    num_left = 0
    first = 0
    while (num_left == 0) & (first < num_words):
        index = first + tl.arange(0, WORD_BLOCK)
        is_word = index < num_words
        # Bits behind the vocabulary are no tokens.
        num_bits = tl.minimum(tl.maximum(vocab_size - index * 32, 0), 32)
        left = tl.where(num_bits == 32, -1, (1 << (num_bits % 32)) - 1)
        if is_short:
            left &= tl.load(stop_words + index, mask=is_word, other=0) ^ -1

        if is_restricted:
            left &= tl.load(allowed_words + index, mask=is_word, other=0)

        if is_constrained:
            left &= tl.load(mask_words + index, mask=is_word, other=0)

        num_left = tl.sum((left != 0).to(tl.int32), axis=0)
        first += WORD_BLOCK

    return num_left > 0


@triton.jit
def rule_logits(
    logits, plane_stride, row_slot, row_position, row_token, row_mask_words,
    slot_flags, slot_min_length, slot_presence, slot_frequency, slot_repetition, slot_num_logprobs,
    slot_temperature, slot_top_p, slot_bias, slot_counts, slot_prompt_bits, slot_stop_bits, slot_allowed_bits,
    chunk_value, chunk_token, chunk_mass, raw_max, raw_sum, vocab_size, num_words,
    ROWS_PER_SLOT: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks). Writes plane 1 of the rows that have rules, every chunk's best (chunk_value,
    chunk_token), where top_p applies the mass of its scaled logits with the best at zero (chunk_mass), and,
    of the raw logits of rows that report log-probabilities, each chunk's largest and the sum of exponentials
    below it (raw_max, raw_sum)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot + row)
    if slot < 0:
        return

    temperature, top_p = tl.load(slot_temperature + slot), tl.load(slot_top_p + slot)
    wide_row, wide_slot = row.to(tl.int64), slot.to(tl.int64)
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    in_vocab = token_ids < vocab_size
    raw_logits = logits + wide_row * vocab_size + token_ids
    values = tl.load(raw_logits, mask=in_vocab, other=-float("inf"))
    cell = row * tl.num_programs(1) + chunk
    if tl.load(slot_num_logprobs + slot) >= 0:
        largest = tl.max(values, axis=0)
        reference = tl.where(largest == -float("inf"), 0.0, largest)
        tl.store(raw_max + cell, largest)
        tl.store(raw_sum + cell, tl.sum(tl.exp(values - reference), axis=0))

    flags = tl.load(slot_flags + slot)
    is_short = _bans_stops(flags, tl.load(slot_min_length + slot), tl.load(row_position + row))
    if _has_rules(flags, is_short):
        if (flags & BIAS) != 0:
            values += tl.load(slot_bias + wide_slot * vocab_size + token_ids, mask=in_vocab, other=0.0)

        if (flags & PENALTIES) != 0:
            counts = tl.load(slot_counts + wide_slot * vocab_size + token_ids, mask=in_vocab, other=0)
            # A slot's later rows are reached only if the tokens drafted before them were chosen.
            step = row % ROWS_PER_SLOT
            for depth in tl.static_range(1, ROWS_PER_SLOT):
                drafted = tl.load(row_token + row - step + depth, mask=depth <= step, other=-1)
                counts += (token_ids == drafted).to(tl.int32)

            is_seen = _bits(slot_prompt_bits + wide_slot * num_words, token_ids, in_vocab) | (counts > 0)
            repetition = tl.load(slot_repetition + slot)
            divided = tl.div_rn(values, repetition)
            penalised = tl.where(values < 0, values * repetition, divided)
            values = tl.where(is_seen, penalised, values)
            values -= tl.load(slot_frequency + slot) * counts.to(tl.float32)
            values -= tl.load(slot_presence + slot) * (counts > 0).to(tl.float32)

        stop_words = slot_stop_bits + wide_slot * num_words
        allowed_words = slot_allowed_bits + wide_slot * num_words
        mask_words = row_mask_words + wide_row * num_words
        is_restricted = (flags & ALLOWED) != 0
        is_constrained = (flags & CONSTRAINT) != 0
        # Stop ids give way where nothing else would be left, allowed ids to a constraint.
        if is_short | (is_restricted & is_constrained):
            is_left = _leaves_any(
                stop_words, allowed_words, mask_words, is_short, is_restricted, is_constrained, vocab_size
            )
            is_short = is_short & is_left
            is_restricted = is_restricted & (is_left | (is_constrained == 0))

        if is_short:
            values = tl.where(_bits(stop_words, token_ids, in_vocab), -float("inf"), values)

        if is_restricted:
            values = tl.where(_bits(allowed_words, token_ids, in_vocab), values, -float("inf"))

        if is_constrained:
            values = tl.where(_bits(mask_words, token_ids, in_vocab), values, -float("inf"))

        tl.store(raw_logits + plane_stride, values, mask=in_vocab)

    value, token = arg_max(values, token_ids)
    tl.store(chunk_value + cell, value)
    tl.store(chunk_token + cell, token)
    if (temperature > 0) & (top_p < 1):
        reference = tl.where(value == -float("inf"), 0.0, value)
        tl.store(chunk_mass + cell, tl.sum(tl.exp(scale(values, reference, temperature)), axis=0))
