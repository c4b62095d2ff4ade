"""Records of a round's results, and parts of the kernels that commit rounds.

A slot's record: its number of tokens, why it has ended (0: it has not), how many tokens were drafted, how
many of these accepted, and whether they were n-grams in place of a draft model's; then of each row, as far as
its token was emitted, the token, its log-probability, MAX_TOP token ids and their log-probabilities (fp32
bits), the last three for slots that report them.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.sampling.rows import MAX_TOP
from drift_sdk._kernels.slots.slot_columns import SlotFlag

__all__ = [
    "FINISHED_LENGTH",
    "FINISHED_STOP",
    "HEADER_SIZE",
    "PENALTIES",
    "RECORD_HEADER_WORDS",
    "ROW_RECORD_WORDS",
    "ROW_SIZE",
    "append_token",
    "emit_token",
    "find_record",
    "finish_of",
    "is_stop_token",
    "record_words",
    "write_empty_record",
    "write_slot",
]

FINISHED_STOP, FINISHED_LENGTH = 1, 2
"""Reasons for which a slot has ended, as in `SlotState.finish` and in its record; 0: it has not."""
RECORD_HEADER_WORDS = 5
"""Number of tokens, finish, number drafted, number accepted, whether these are n-grams."""
ROW_RECORD_WORDS = 2 + 2 * MAX_TOP
"""Token, log-probability, MAX_TOP ids, MAX_TOP log-probabilities."""

STOP, LENGTH = tl.constexpr(FINISHED_STOP), tl.constexpr(FINISHED_LENGTH)
HEADER_SIZE, ROW_SIZE = tl.constexpr(RECORD_HEADER_WORDS), tl.constexpr(ROW_RECORD_WORDS)
TOP = tl.constexpr(MAX_TOP)
PADDED_TOP = tl.constexpr(next_power_of_2(MAX_TOP))
PENALTIES = tl.constexpr(SlotFlag.PENALTIES.value)


def record_words(rows_per_slot: int) -> int:
    """Words of the record of a slot with this many rows."""
    return RECORD_HEADER_WORDS + rows_per_slot * ROW_RECORD_WORDS


@device_function
def find_record(
    output_ring_ptr,  # [num_entries, entry_words] int32
    current_entry_ptr,  # [1] int32
    slot_index,  # of the slot in the step
    entry_words,
    ROWS_PER_SLOT: tl.constexpr,
):
    """The pointer to a slot's record in this replay's entry of the ring."""
    entry_index = tl.load(current_entry_ptr).to(tl.int64)
    record_size = HEADER_SIZE + ROWS_PER_SLOT * ROW_SIZE
    return output_ring_ptr + entry_index * entry_words + slot_index * record_size


@device_function
def write_empty_record(
    record_ptr,  # the slot's record
    emitted_ptr,  # the slot's word
):
    """Write the results of padding: no tokens."""
    tl.store(emitted_ptr, 0)
    tl.store(record_ptr, 0)
    tl.store(record_ptr + 1, 0)
    tl.store(record_ptr + 2, 0)
    tl.store(record_ptr + 3, 0)
    tl.store(record_ptr + 4, 0)


@device_function
def is_stop_token(
    token,  # one or several
    mask,
    slot_stop_bits_ptr,  # [W] int32: the slot's
):
    """Stop bits of tokens [N]: True for the stop ids of a slot."""
    word = tl.load(slot_stop_bits_ptr + token // 32, mask=mask, other=0)
    return ((word >> (token % 32)) & 1) != 0


@device_function
def finish_of(
    is_stop,
    length,  # of the sequence, with the token
    max_length,
):
    """The reason for which a slot ends with a token (0: it does not): a stop id takes precedence over the
    length limit."""
    return tl.where(is_stop, STOP, tl.where(length >= max_length, LENGTH, 0))


@device_function
def append_token(
    token,
    row,
    is_counted,  # whether the slot has penalties
    has_logprobs,
    slot_counts_ptr,  # [V] int32: the slot's, written
    chosen_logprob_ptr,  # [R] fp32
    top_token_ptr,  # [R, MAX_TOP] int32
    top_logprob_ptr,  # [R, MAX_TOP] fp32
    row_record_ptr,  # the row's part of the record, written
):
    """Append `token`, chosen behind `row`."""
    tl.store(row_record_ptr, token)
    if is_counted:
        tl.atomic_add(slot_counts_ptr + token, 1, sem="relaxed")
    if has_logprobs:
        rank = tl.arange(0, PADDED_TOP)
        is_rank = rank < TOP
        logprob = tl.load(chosen_logprob_ptr + row)
        tl.store(row_record_ptr + 1, logprob.to(tl.int32, bitcast=True))
        ids = tl.load(top_token_ptr + row * TOP + rank, mask=is_rank, other=-1)
        values = tl.load(top_logprob_ptr + row * TOP + rank, mask=is_rank, other=0.0)
        tl.store(row_record_ptr + 2 + rank, ids, mask=is_rank)
        tl.store(row_record_ptr + 2 + TOP + rank, values.to(tl.int32, bitcast=True), mask=is_rank)


@device_function
def emit_token(
    token,
    row,
    length,  # of the sequence, with this token
    max_length,
    is_counted,  # as of `append_token`, like the next ones
    has_logprobs,
    slot_stop_bits_ptr,  # [W] int32: the slot's
    slot_counts_ptr,
    chosen_logprob_ptr,
    top_token_ptr,
    top_logprob_ptr,
    row_record_ptr,
):
    """Append `token`, chosen behind `row`. Returns why the slot ends with it (0: it does not)."""
    append_token(
        token, row, is_counted, has_logprobs, slot_counts_ptr, chosen_logprob_ptr, top_token_ptr,
        top_logprob_ptr, row_record_ptr,
    )  # fmt: skip
    return finish_of(is_stop_token(token, True, slot_stop_bits_ptr), length, max_length)


@device_function
def write_slot(
    length_ptr,  # the slot's word, as in the next three
    last_token_ptr,
    finish_ptr,
    emitted_ptr,
    record_ptr,  # the slot's record
    new_length,
    newest,
    finish,
    num_tokens,
    num_drafted,
    num_accepted,
    is_ngram,
):
    """Write the results of a slot: its state, and the header of its record."""
    tl.store(length_ptr, new_length)
    tl.store(last_token_ptr, newest)
    tl.store(finish_ptr, finish)
    tl.store(emitted_ptr, num_tokens)
    tl.store(record_ptr, num_tokens)
    tl.store(record_ptr + 1, finish)
    tl.store(record_ptr + 2, num_drafted)
    tl.store(record_ptr + 3, num_accepted)
    tl.store(record_ptr + 4, is_ngram)
