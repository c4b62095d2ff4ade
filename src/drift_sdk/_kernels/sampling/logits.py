"""Logits before a token is chosen: rules of slots, counts of tokens that rules need, scaling.

The rules of a slot applied to its rows' logits: bias, penalties, stop ids, allowed ids, constraint.

Rules apply in this order: the bias is added; tokens seen before get the repetition, frequency and presence
penalties; tokens that the rules forbid become -inf. Stop ids are forbidden while the sequence is shorter than
min_length, unless no other token would be left; allowed ids give way to a constraint where the two together
would leave no token.

Grid (rows, chunks): a program owns a chunk of a row, in `rule_logits`. It also finds the best token of its
chunk, which is all that a greedy row needs; the chunk's mass, which top_p needs; and the largest raw logit
and the sum of exponentials, which log-probabilities need. Sums run over one chunk in the order of Triton's
reduction, which CHUNK_TOKENS and the 8 warps fix, so a row's bits do not depend on other rows. Products are
rounded before they are subtracted, as in the reference: no fused multiply-add.

Bytes: a row of logits once, and once more to write it where rules apply; of the tables the slot's rows.

Programmatic dependent launch: the kernel waits for its producers before its first read, and lets its
dependents, the short launches of `sample_rows`, start right after that.

Reference: `eager.sampling.apply_processors`.

Counts of the tokens that a prefill brings in, which the penalties need.

Grid (tiles of rows,): a program owns TILE_ROWS rows. Rows of one slot may lie in several programs and hold
the same token, so sets and counts are updated by atomic operations; on integers, so the order in which
programs get there does not matter. Bytes: 12 a row, and up to 16 more for rows of slots with penalties.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

Reference: `LogitsProcessors.count` in execution.eager.sampling.

Scaled logits: logits over the temperature, with the row's largest at zero. Filters and noise work on them.

Parts of kernels; in the reference they are the first line of `eager.sampling.sample`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.rows import CHUNK_TOKENS, LEAST_NOISE, MOST_NOISE, RowsToSample, arg_max
from drift_sdk._kernels.slots import CONSTRAINT, SlotColumns, SlotFlag

NEGLIGIBLE_LOGIT = tl.constexpr(LEAST_NOISE - MOST_NOISE - 0.1)
"""About -25.8. A token with a scaled logit below it is never chosen: even with the most noise it stays below
the best token with the least, with 0.1 for rounding. Where a filter cuts below it does not matter."""
LEAST_TEMPERATURE = tl.constexpr(1e-30)
"""Keeps the factor finite, so that the best logit, 0, is never multiplied by infinity. Far below every
temperature at which more than one token can be chosen."""


@device_function
def scale(logits, row_max, temperature):
    """Scaled logits, of logits [N] of a row whose largest is `row_max`."""
    return (logits - row_max) * (1.0 / tl.maximum(temperature, LEAST_TEMPERATURE))


@device_function
def best_of_chunks(
    chunk_value_ptr,  # [R, C] fp32
    row,
    num_chunks,  # C
    PADDED_CHUNKS: tl.constexpr,  # C as a power of two
):
    """The largest logit of a row, from those of its chunks; 0 if all are -inf."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    values = tl.load(chunk_value_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    best = tl.max(values, axis=0)
    return tl.where(best == -float("inf"), 0.0, best)


@device_function
def mass_of_chunks(
    chunk_value_ptr,  # [R, C] fp32
    chunk_mass_ptr,  # [R, C] fp32: each with the chunk's best at zero
    row,
    best,  # of the row
    temperature,
    num_chunks,  # C
    PADDED_CHUNKS: tl.constexpr,  # C as a power of two
):
    """The mass of a row: the sum of exp(scaled logits), chunk by chunk in one reduction."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    cell = row * num_chunks + chunk
    is_chunk = chunk < num_chunks
    values = tl.load(chunk_value_ptr + cell, mask=is_chunk, other=-float("inf"))
    masses = tl.load(chunk_mass_ptr + cell, mask=is_chunk, other=0.0)
    return tl.sum(masses * tl.exp(scale(values, best, temperature)), axis=0)


BIAS = tl.constexpr(SlotFlag.BIAS.value)
PENALTIES = tl.constexpr(SlotFlag.PENALTIES.value)
ALLOWED = tl.constexpr(SlotFlag.ALLOWED.value)
STOPS = tl.constexpr(SlotFlag.STOPS.value)

CHUNK_WORDS = tl.constexpr(1024)
"""Words of a set of tokens read at a time in `_leaves_any`: 4 a thread of 8 warps, one load of 16 bytes,
and 32,768 tokens, a quarter of a vocabulary of 128,256."""


@device_function
def _bans_stops(flags, min_length, position):
    """Whether stop ids are forbidden behind the token at `position`: the sequence would end too short."""
    return ((flags & STOPS) != 0) & (position + 1 < min_length)


@device_function
def _has_rules(flags, is_short):
    """Whether rules change a row's logits, which are then in plane 1."""
    return ((flags & (BIAS | PENALTIES | ALLOWED | CONSTRAINT)) != 0) | is_short


@device_function
def find_ruled_row(
    logits_ptr,  # [2, R, V] fp32
    logits_plane_stride,
    row_position_ptr,  # [R] int32
    flags_ptr,  # [S] int32
    min_length_ptr,  # [S] int32
    row,
    slot,  # not -1
    vocab_size,  # V
):
    """The pointer to a row's logits [V] with its rules applied: in plane 1 if there are any, else in plane
    0."""
    flags = tl.load(flags_ptr + slot)
    is_short = _bans_stops(flags, tl.load(min_length_ptr + slot), tl.load(row_position_ptr + row))
    plane = _has_rules(flags, is_short).to(tl.int64)
    return logits_ptr + plane * logits_plane_stride + row.to(tl.int64) * vocab_size


@device_function
def _has_bit(words_ptr, token_ids, in_vocab):
    """Whether each of token_ids [N] is in the set of tokens at words_ptr [W] int32."""
    word = tl.load(words_ptr + token_ids // 32, mask=in_vocab, other=0)
    return ((word >> (token_ids % 32)) & 1) != 0


@device_function
def _leaves_any(
    stop_words_ptr,  # [W] int32: the slot's stop ids
    allowed_words_ptr,  # [W] int32: its allowed ids
    mask_words_ptr,  # [W] int32: what the row's constraint allows
    is_short,  # whether stop ids are forbidden
    is_restricted,  # whether only allowed ids may be chosen
    is_constrained,  # whether the row has a constraint
    vocab_size,
):
    """Whether all rules together leave any token."""
    num_words = (vocab_size + 31) // 32
    num_left = 0
    first_word = 0
    while (num_left == 0) & (first_word < num_words):
        word = first_word + tl.arange(0, CHUNK_WORDS)
        is_word = word < num_words
        # Bits behind the vocabulary are no tokens.
        num_bits = tl.minimum(tl.maximum(vocab_size - word * 32, 0), 32)
        left = tl.where(num_bits == 32, -1, (1 << (num_bits % 32)) - 1)
        if is_short:
            left &= tl.load(stop_words_ptr + word, mask=is_word, other=0) ^ -1

        if is_restricted:
            left &= tl.load(allowed_words_ptr + word, mask=is_word, other=0)

        if is_constrained:
            left &= tl.load(mask_words_ptr + word, mask=is_word, other=0)

        num_left = tl.sum((left != 0).to(tl.int32), axis=0)
        first_word += CHUNK_WORDS

    return num_left > 0


@device_function
def _penalise(
    logits,  # [N] fp32
    token_ids,  # [N]
    in_vocab,  # [N]
    slot_counts_ptr,  # [V] int32: how often the slot generated each token
    slot_prompt_bits_ptr,  # [W] int32
    row_token_ptr,  # [R] int32
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32, or None
    row,
    presence_ptr,  # fp32: the slot's word of each of the three
    frequency_ptr,
    repetition_ptr,
    ROWS_PER_SLOT: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
):
    """Logits less the penalties for tokens seen before."""
    counts = tl.load(slot_counts_ptr + token_ids, mask=in_vocab, other=0)
    # A slot's later rows are reached only if the tokens drafted before them were chosen.
    depth = row % ROWS_PER_SLOT
    if row_path_ptr is None:
        for earlier in tl.static_range(1, ROWS_PER_SLOT):
            drafted = tl.load(row_token_ptr + row - depth + earlier, mask=earlier <= depth, other=-1)
            counts += (token_ids == drafted).to(tl.int32)
    else:
        for earlier in range(1, NUM_PATH_ENTRIES):
            node = tl.load(row_path_ptr + row * NUM_PATH_ENTRIES + earlier)
            drafted = tl.load(row_token_ptr + row - depth + node, mask=node >= 0, other=-1)
            counts += (token_ids == drafted).to(tl.int32)

    is_seen = _has_bit(slot_prompt_bits_ptr, token_ids, in_vocab) | (counts > 0)
    repetition = tl.load(repetition_ptr)
    divided = tl.div_rn(logits, repetition)
    penalised = tl.where(logits < 0, logits * repetition, divided)
    logits = tl.where(is_seen, penalised, logits)
    logits -= tl.load(frequency_ptr) * counts.to(tl.float32)
    logits -= tl.load(presence_ptr) * (counts > 0).to(tl.float32)
    return logits


@device_function
def _forbid(
    logits,  # [N] fp32
    token_ids,  # [N]
    in_vocab,  # [N]
    stop_words_ptr,  # [W] int32: the slot's stop ids
    allowed_words_ptr,  # [W] int32: its allowed ids
    mask_words_ptr,  # [W] int32: what the row's constraint allows
    is_short,
    flags,
    vocab_size,
):
    """Logits with -inf for tokens that must not be chosen."""
    is_restricted = (flags & ALLOWED) != 0
    is_constrained = (flags & CONSTRAINT) != 0
    # Stop ids give way where nothing else would be left, allowed ids to a constraint.
    if is_short | (is_restricted & is_constrained):
        is_left = _leaves_any(
            stop_words_ptr,
            allowed_words_ptr,
            mask_words_ptr,
            is_short,
            is_restricted,
            is_constrained,
            vocab_size,
        )
        is_short = is_short & is_left
        is_restricted = is_restricted & (is_left | (is_constrained == 0))

    if is_short:
        logits = tl.where(_has_bit(stop_words_ptr, token_ids, in_vocab), -float("inf"), logits)

    if is_restricted:
        logits = tl.where(_has_bit(allowed_words_ptr, token_ids, in_vocab), logits, -float("inf"))

    if is_constrained:
        logits = tl.where(_has_bit(mask_words_ptr, token_ids, in_vocab), logits, -float("inf"))

    return logits


@kernel
def rule_logits(
    # The rows.
    logits_ptr,  # [2, R, V] fp32: plane 0 is read, plane 1 written
    logits_plane_stride,
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32, or None
    row_mask_words_ptr,  # [R, W] int32
    # The slots.
    flags_ptr,  # [S] int32
    min_length_ptr,  # [S] int32
    presence_ptr,  # [S] fp32
    frequency_ptr,  # [S] fp32
    repetition_ptr,  # [S] fp32
    num_logprobs_ptr,  # [S] int32
    temperature_ptr,  # [S] fp32
    top_p_ptr,  # [S] fp32
    bias_ptr,  # [S, V] fp32
    counts_ptr,  # [S, V] int32
    prompt_bits_ptr,  # [S, W] int32
    stop_bits_ptr,  # [S, W] int32
    allowed_bits_ptr,  # [S, W] int32
    # The results, as in `SampleBuffers`.
    chunk_value_ptr,  # [R, C] fp32
    chunk_token_ptr,  # [R, C] int32
    chunk_mass_ptr,  # [R, C] fp32
    raw_max_ptr,  # [R, C] fp32
    raw_sum_ptr,  # [R, C] fp32
    # Sizes.
    vocab_size,  # V
    num_words,  # W
    ROWS_PER_SLOT: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, C). Longer than other kernels by its signature: it reads every rule there is."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + row)
    if slot < 0:
        return

    temperature, top_p = tl.load(temperature_ptr + slot), tl.load(top_p_ptr + slot)
    wide_row, wide_slot = row.to(tl.int64), slot.to(tl.int64)
    token_ids = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
    in_vocab = token_ids < vocab_size
    raw_logits_ptr = logits_ptr + wide_row * vocab_size + token_ids
    logits = tl.load(raw_logits_ptr, mask=in_vocab, other=-float("inf"))
    cell = row * tl.num_programs(1) + chunk
    if tl.load(num_logprobs_ptr + slot) >= 0:
        largest = tl.max(logits, axis=0)
        zero = tl.where(largest == -float("inf"), 0.0, largest)
        tl.store(raw_max_ptr + cell, largest)
        tl.store(raw_sum_ptr + cell, tl.sum(tl.exp(logits - zero), axis=0))

    flags = tl.load(flags_ptr + slot)
    is_short = _bans_stops(flags, tl.load(min_length_ptr + slot), tl.load(row_position_ptr + row))
    if _has_rules(flags, is_short):
        if (flags & BIAS) != 0:
            logits += tl.load(bias_ptr + wide_slot * vocab_size + token_ids, mask=in_vocab, other=0.0)

        if (flags & PENALTIES) != 0:
            logits = _penalise(
                logits,
                token_ids,
                in_vocab,
                counts_ptr + wide_slot * vocab_size,
                prompt_bits_ptr + wide_slot * num_words,
                row_token_ptr,
                row_path_ptr,
                row,
                presence_ptr + slot,
                frequency_ptr + slot,
                repetition_ptr + slot,
                ROWS_PER_SLOT,
                NUM_PATH_ENTRIES,
            )

        logits = _forbid(
            logits,
            token_ids,
            in_vocab,
            stop_bits_ptr + wide_slot * num_words,
            allowed_bits_ptr + wide_slot * num_words,
            row_mask_words_ptr + wide_row * num_words,
            is_short,
            flags,
            vocab_size,
        )
        tl.store(raw_logits_ptr + logits_plane_stride, logits, mask=in_vocab)

    best, token = arg_max(logits, token_ids)
    tl.store(chunk_value_ptr + cell, best)
    tl.store(chunk_token_ptr + cell, token)
    if (temperature > 0) & (top_p < 1):
        zero = tl.where(best == -float("inf"), 0.0, best)
        tl.store(chunk_mass_ptr + cell, tl.sum(tl.exp(scale(logits, zero, temperature)), axis=0))


def apply_logits_rules(rows: RowsToSample) -> None:
    """Write plane 1 of rows that have rules, and of every chunk: the best token (chunk_value, chunk_token);
    the mass where top_p applies (chunk_mass); of raw logits where log-probabilities are reported, the largest
    and the sum of exponentials (raw_max, raw_sum)."""
    slots, buffers = rows.slots, rows.buffers
    rule_logits[rows.chunk_grid](
        rows.logits,
        rows.logits.stride(0),
        rows.row_slot,
        rows.row_position,
        rows.row_token,
        rows.row_path,
        rows.mask_words,
        slots.flags,
        slots.min_length,
        slots.presence_penalty,
        slots.frequency_penalty,
        slots.repetition_penalty,
        slots.num_logprobs,
        slots.temperature,
        slots.top_p,
        slots.bias,
        slots.counts,
        slots.prompt_bits,
        slots.stop_bits,
        slots.allowed_bits,
        buffers.chunk_value,
        buffers.chunk_token,
        buffers.chunk_mass,
        buffers.raw_max,
        buffers.raw_sum,
        rows.vocab_size,
        rows.mask_words.shape[1],
        ROWS_PER_SLOT=rows.rows_per_slot,
        NUM_PATH_ENTRIES=0 if rows.row_path is None else rows.row_path.shape[1],
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=8,
        enable_fp_fusion=False,  # a product is rounded before it is subtracted, as in the reference
        **launch_options(),
    )


TILE_ROWS = 256
"""Rows of a program: two a thread of 4 warps."""


@kernel
def _count_tokens(
    row_slot_ptr,  # [N] int32; -1: padding
    row_token_ptr,  # [N] int32; -1: none
    row_position_ptr,  # [N] int32
    flags_ptr,  # [S] int32
    num_prompt_tokens_ptr,  # [S] int32
    counts_ptr,  # [S, VOCAB_SIZE] int32, counted up
    prompt_bits_ptr,  # [S, NUM_WORDS] int32, bits are set
    num_rows,  # N
    VOCAB_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of rows,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    slot = tl.load(row_slot_ptr + row, mask=is_row, other=-1)
    token = tl.load(row_token_ptr + row, mask=is_row, other=-1)
    is_counted = (slot >= 0) & (token >= 0)
    is_counted &= (tl.load(flags_ptr + slot, mask=is_counted, other=0) & PENALTIES) != 0
    position = tl.load(row_position_ptr + row, mask=is_counted, other=0)
    is_prompt = position < tl.load(num_prompt_tokens_ptr + slot, mask=is_counted, other=0)
    wide_slot = slot.to(tl.int64)
    word_ptr = prompt_bits_ptr + wide_slot * NUM_WORDS + token // 32
    tl.atomic_or(word_ptr, 1 << (token % 32), mask=is_counted & is_prompt, sem="relaxed")
    count_ptr = counts_ptr + wide_slot * VOCAB_SIZE + token
    tl.atomic_add(count_ptr, 1, mask=is_counted & (is_prompt == 0), sem="relaxed")


def count_tokens(row_slot: Tensor, row_token: Tensor, row_position: Tensor, slots: SlotColumns) -> None:
    """Mark each row's token as one of its slot's prompt, or count it as generated, by its position.

    row_slot, row_token, row_position [N] int32; rows of a negative slot or token, and of slots without
    penalties, change nothing. Raises ValueError for another shape or type.
    """
    (num_rows,) = row_slot.shape
    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)

    slots.check()
    _count_tokens[(cdiv(num_rows, TILE_ROWS),)](
        row_slot,
        row_token,
        row_position,
        slots.flags,
        slots.num_prompt_tokens,
        slots.counts,
        slots.prompt_bits,
        num_rows,
        VOCAB_SIZE=slots.vocab_size,
        NUM_WORDS=slots.prompt_bits.shape[1],
        TILE_ROWS=TILE_ROWS,
        PDL=uses_pdl(),
        **launch_options(),
    )
