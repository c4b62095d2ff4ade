"""The commit of a round: drafts are accepted, tokens appended, slots ended, and the results recorded.

A slot's rows hold its newest token and the tokens drafted behind it. The token chosen behind the first row is
always emitted. The one behind the next row is emitted too if that row's draft is the token emitted before it;
and so on, until a wrong draft, a stop id or the length limit.

Grid: one program a slot of the step, which owns the slot's row of the tables, its record and all of its rows,
so the tokens of a slot are appended in order. Program 0 also moves the ring's index on to the next replay's
entry. Bytes: 56 a slot, 20 a row and, for each token emitted, 8 with penalties and 328 with
log-probabilities. Everything computed is an integer; log-probabilities are copied bit by bit.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that. It is the last kernel of a round, or the last before a drafter's.

`commit_simulated` in perf/harness/simulated_acceptance.py is the same with a given number of right drafts.

Records of a round's results, and parts of the kernels that commit rounds.

A slot's record: its number of tokens, why it has ended (0: it has not), how many tokens were drafted, how
many of these accepted, and whether they were n-grams in place of a draft model's; then of each row, as far as
its token was emitted, the token, its log-probability, MAX_TOP token ids and their log-probabilities (fp32
bits), the last three for slots that report them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.arguments import check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.logits import PENALTIES
from drift_sdk._kernels.sampling.rows import MAX_TOP, SampleBuffers
from drift_sdk._kernels.slots import SlotColumns, SlotState, entry_after

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


@kernel
def _commit(
    # The rows of the step, and what was chosen behind them.
    row_slot_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    chosen_ptr,  # [R] int32
    chosen_logprob_ptr,  # [R] fp32
    top_token_ptr,  # [R, MAX_TOP] int32
    top_logprob_ptr,  # [R, MAX_TOP] fp32
    # The slots.
    length_ptr,  # [S] int32, read and written
    last_token_ptr,  # [S] int32, written
    finish_ptr,  # [S] int32, written
    max_length_ptr,  # [S] int32
    flags_ptr,  # [S] int32
    num_logprobs_ptr,  # [S] int32
    stop_bits_ptr,  # [S, W] int32
    counts_ptr,  # [S, V] int32, counted up
    is_ngram_ptr,  # [B] int32, or None
    # The results.
    emitted_ptr,  # [B] int32, written
    output_ring_ptr,  # [num_entries, entry_words] int32, pinned, written
    current_entry_ptr,  # [1] int32
    next_entry_ptr,  # [1] int32, read and written
    # Sizes.
    num_entries,
    entry_words,
    vocab_size,  # V
    num_words,  # W
    ROWS_PER_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program a slot of the step. Longer than other kernels by its lists of arguments."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    slot_index = tl.program_id(0)
    first_row = slot_index * ROWS_PER_SLOT
    slot = tl.load(row_slot_ptr + first_row)
    record_ptr = find_record(output_ring_ptr, current_entry_ptr, slot_index, entry_words, ROWS_PER_SLOT)
    if slot_index == 0:
        tl.store(next_entry_ptr, entry_after(tl.load(next_entry_ptr), num_entries))
    if slot < 0:
        write_empty_record(record_ptr, emitted_ptr + slot_index)
    else:
        slot_stop_bits_ptr = stop_bits_ptr + slot.to(tl.int64) * num_words
        slot_counts_ptr = counts_ptr + slot.to(tl.int64) * vocab_size
        start = tl.load(length_ptr + slot)
        max_length = tl.load(max_length_ptr + slot)
        is_counted = (tl.load(flags_ptr + slot) & PENALTIES) != 0
        has_logprobs = tl.load(num_logprobs_ptr + slot) >= 0
        # Changed in branches below, so tensors of `start`'s type from the beginning.
        num_tokens = start * 0
        num_drafted = start * 0
        num_accepted = start * 0
        finish = start * 0
        newest = start * 0
        is_walking = start >= 0
        for depth in tl.static_range(ROWS_PER_SLOT):
            row = first_row + depth
            token = tl.load(chosen_ptr + row, mask=is_walking, other=0)
            if depth + 1 < ROWS_PER_SLOT:
                is_drafted = tl.load(row_slot_ptr + row + 1) >= 0
                draft = tl.load(row_token_ptr + row + 1)
            if is_walking:
                newest = token
                num_tokens += 1
                finish = emit_token(
                    token,
                    row,
                    start + num_tokens,
                    max_length,
                    is_counted,
                    has_logprobs,
                    slot_stop_bits_ptr,
                    slot_counts_ptr,
                    chosen_logprob_ptr,
                    top_token_ptr,
                    top_logprob_ptr,
                    record_ptr + HEADER_SIZE + depth * ROW_SIZE,
                )
            if depth + 1 < ROWS_PER_SLOT:
                is_right = is_walking & is_drafted & (draft == token)
                num_drafted += is_drafted.to(tl.int32)
                num_accepted += is_right.to(tl.int32)
                is_walking = is_right & (finish == 0)

        write_slot(
            length_ptr + slot,
            last_token_ptr + slot,
            finish_ptr + slot,
            emitted_ptr + slot_index,
            record_ptr,
            start + num_tokens,
            newest,
            finish,
            num_tokens,
            num_drafted,
            num_accepted,
            num_tokens * 0 if is_ngram_ptr is None else tl.load(is_ngram_ptr + slot_index),
        )


class CommitTensors(Struct, frozen=True, kw_only=True):
    """The R rows of a step, what was chosen behind them, and what a commit of their B slots reads and writes.

    row_slot, row_token [R]: `rows_per_slot` rows of each of B slots, no two of which are the same. The first
    has slot -1 for padding, the others where nothing was drafted. buffers: what `sample_rows` has chosen for
    them. state, slots: of all slots. emitted [B], written: how many tokens each slot got. output_ring
    [num_entries, entry_words], pinned: its entry current_entry [1] gets the slots' records, one behind
    another. next_entry [1] moves on to the next replay's entry: no kernel behind a commit may read this
    replay's input. is_ngram [B]: 1 for slots whose drafts are n-grams in place of a draft model's; None: of
    no slot. All int32.
    """

    row_slot: Tensor
    row_token: Tensor
    buffers: SampleBuffers
    state: SlotState
    slots: SlotColumns
    emitted: Tensor
    output_ring: Tensor
    current_entry: Tensor
    next_entry: Tensor
    rows_per_slot: int = 1
    is_ngram: Tensor | None = None

    @property
    def num_slots(self) -> int:
        """B."""
        return self.emitted.shape[0]

    def kernel_arguments(self, num_words: int) -> dict[str, Tensor | int | None]:
        """The arguments of commit kernels, by name. num_words: those of the results of all slots.

        Raises ValueError for another shape or type.
        """
        buffers, state, slots = self.buffers, self.state, self.slots
        num_slots, (num_rows,) = self.num_slots, self.row_slot.shape
        if num_rows != num_slots * self.rows_per_slot:
            expected = f"{self.rows_per_slot} of each of {num_slots} slots"
            raise ValueError(f"row_slot: {num_rows} rows: expected {expected}")

        check_tensors((num_rows,), torch.int32, row_slot=self.row_slot, row_token=self.row_token)
        buffers.check(num_rows, slots.vocab_size)
        state.check()
        slots.check()
        check_tensors((num_slots,), torch.int32, emitted=self.emitted, is_ngram=self.is_ngram)
        check_tensor("output_ring", self.output_ring, self.output_ring.shape, torch.int32)
        indices = {"current_entry": self.current_entry, "next_entry": self.next_entry}
        check_tensors((1,), torch.int32, **indices)
        num_entries, entry_words = self.output_ring.shape
        if entry_words < num_words:
            raise ValueError(f"output_ring: {entry_words} words an entry: expected at least {num_words}")

        return {
            "row_slot_ptr": self.row_slot,
            "row_token_ptr": self.row_token,
            "chosen_ptr": buffers.chosen,
            "chosen_logprob_ptr": buffers.chosen_logprob,
            "top_token_ptr": buffers.top_token,
            "top_logprob_ptr": buffers.top_logprob,
            "length_ptr": state.length,
            "last_token_ptr": state.last_token,
            "finish_ptr": state.finish,
            "max_length_ptr": state.max_length,
            "flags_ptr": slots.flags,
            "num_logprobs_ptr": slots.num_logprobs,
            "stop_bits_ptr": slots.stop_bits,
            "counts_ptr": slots.counts,
            "is_ngram_ptr": self.is_ngram,
            "emitted_ptr": self.emitted,
            "output_ring_ptr": self.output_ring,
            "current_entry_ptr": self.current_entry,
            "next_entry_ptr": self.next_entry,
            "num_entries": num_entries,
            "entry_words": entry_words,
            "vocab_size": slots.vocab_size,
            "num_words": slots.stop_bits.shape[1],
        }


def commit(tensors: CommitTensors) -> None:
    """Advance the slots of rows by what was chosen, and record it for the host.

    Raises ValueError for another shape or type.
    """
    rows_per_slot = tensors.rows_per_slot
    _commit[(tensors.num_slots,)](
        **tensors.kernel_arguments(tensors.num_slots * record_words(rows_per_slot)),
        ROWS_PER_SLOT=rows_per_slot,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
