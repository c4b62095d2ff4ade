"""Accept, append, stop: what a round's chosen tokens do to the slots, and the record of it for the host.

A slot's rows hold its newest token and the tokens drafted behind it. The first row's choice is always
emitted; the next row's too if the draft said the same; and so on, until a wrong draft, a stop id or the
length limit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.sampling.sample_buffers import MAX_TOP, SampleBuffers
from drift_sdk._kernels.slots.input_ring import next_entry
from drift_sdk._kernels.slots.slot_columns import SlotColumns, SlotFlag, SlotState

__all__ = ["FINISHED_LENGTH", "FINISHED_STOP", "SimulatedRounds", "commit", "record_words"]

FINISHED_STOP, FINISHED_LENGTH = 1, 2
RECORD_HEADER_WORDS = 4
RECORD_HEADER = tl.constexpr(RECORD_HEADER_WORDS)
TOP = tl.constexpr(MAX_TOP)
TOP_PADDED = tl.constexpr(32)
PENALTIES = tl.constexpr(SlotFlag.PENALTIES.value)


def record_words(rows_per_slot: int) -> int:
    """Words of a slot's record: number of tokens, finish, drafted, accepted; then for each row its token, its
    log-probability, MAX_TOP ids and MAX_TOP log-probabilities (fp32 bits)."""
    return RECORD_HEADER_WORDS + rows_per_slot * (2 + 2 * MAX_TOP)


class SimulatedRounds(Struct, frozen=True):
    """For measuring: how many tokens each round is to emit, in turn, and how many rounds each slot had.

    trace [n] int32, num_rounds [S] int32. Round r of slot s takes the entry r + s * `stride`, modulo n.
    """

    trace: Tensor
    num_rounds: Tensor

    @property
    def stride(self) -> int:
        """The golden section of the trace: slots next to each other stand far apart in it."""
        return max(1, round(0.618 * self.trace.shape[0]))


@triton.jit
def _commit(
    row_slot, row_token, chosen, chosen_logprob, top_token, top_logprob,
    length, last_token, finish, max_length, flags, num_logprobs, stop_bits, counts,
    emitted, outbox, current, next_index, num_entries, outbox_words, vocab_size, num_words,
    trace, num_rounds, trace_length, trace_stride,
    ROWS: tl.constexpr, IS_SIMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    group = tl.program_id(0)
    first = group * ROWS
    slot = tl.load(row_slot + first)
    WORDS_PER_ROW: tl.constexpr = 2 + 2 * TOP
    entry = tl.load(current).to(tl.int64)
    record = outbox + entry * outbox_words + group * (RECORD_HEADER + ROWS * WORDS_PER_ROW)
    if group == 0:
        tl.store(next_index, next_entry(tl.load(next_index), num_entries))
    if slot < 0:
        tl.store(emitted + group, 0)
        tl.store(record, 0)
        tl.store(record + 1, 0)
        tl.store(record + 2, 0)
        tl.store(record + 3, 0)
    else:
        wide_slot = slot.to(tl.int64)
        start = tl.load(length + slot)
        limit = tl.load(max_length + slot)
        is_counted = (tl.load(flags + slot) & PENALTIES) != 0
        reports = tl.load(num_logprobs + slot) >= 0
        place = tl.arange(0, TOP_PADDED)
        num_tokens = start * 0
        num_drafted = start * 0
        num_accepted = start * 0
        reason = start * 0
        newest = start * 0
        is_walking = start >= 0
        if IS_SIMULATED:
            num_before = tl.load(num_rounds + slot)
            tl.store(num_rounds + slot, num_before + 1)
            num_right = tl.load(trace + (num_before + slot * trace_stride) % trace_length) - 1
        for row in tl.static_range(ROWS):
            token = tl.load(chosen + first + row, mask=is_walking, other=0)
            if row + 1 < ROWS:
                is_drafted = tl.load(row_slot + first + row + 1) >= 0
                draft = tl.load(row_token + first + row + 1)
                if IS_SIMULATED:
                    token = tl.where(is_drafted & (row < num_right), draft, token)
                    tl.store(chosen + first + row, token)
            if is_walking:
                out = record + RECORD_HEADER + row * WORDS_PER_ROW
                tl.store(out, token)
                newest = token
                num_tokens += 1
                word = tl.load(stop_bits + wide_slot * num_words + token // 32)
                is_stop = ((word >> (token % 32)) & 1) != 0
                reason = tl.where(start + num_tokens >= limit, 2, 0)
                reason = tl.where(is_stop, 1, reason)
                if is_counted:
                    tl.atomic_add(counts + wide_slot * vocab_size + token, 1, sem="relaxed")
                if reports:
                    logprob = tl.load(chosen_logprob + first + row)
                    tl.store(out + 1, logprob.to(tl.int32, bitcast=True))
                    ids = tl.load(top_token + (first + row) * TOP + place, mask=place < TOP, other=-1)
                    values = tl.load(top_logprob + (first + row) * TOP + place, mask=place < TOP, other=0.0)
                    tl.store(out + 2 + place, ids, mask=place < TOP)
                    tl.store(out + 2 + TOP + place, values.to(tl.int32, bitcast=True), mask=place < TOP)
            if row + 1 < ROWS:
                num_drafted += is_drafted.to(tl.int32)
                is_right = is_walking & is_drafted & (draft == token)
                if IS_SIMULATED:
                    is_right &= row < num_right
                num_accepted += is_right.to(tl.int32)
                is_walking = is_right & (reason == 0)

        tl.store(length + slot, start + num_tokens)
        tl.store(last_token + slot, newest)
        tl.store(finish + slot, reason)
        tl.store(emitted + group, num_tokens)
        tl.store(record, num_tokens)
        tl.store(record + 1, reason)
        tl.store(record + 2, num_drafted)
        tl.store(record + 3, num_accepted)


def commit(
    row_slot: Tensor,
    row_token: Tensor,
    buffers: SampleBuffers,
    state: SlotState,
    slots: SlotColumns,
    emitted: Tensor,
    outbox: Tensor,
    current: Tensor,
    next_index: Tensor,
    *,
    rows_per_slot: int = 1,
    simulated: SimulatedRounds | None = None,
) -> None:
    """Advance the slots of rows [R] by what was chosen; record it in entry `current` of outbox [E, words].

    emitted [B] int32 gets the number of tokens of each slot. simulated: drafts are not compared, but as many
    taken for right as its trace says, or all there are; rounds of one row are not counted in it.

    It moves `next_index` on to the next replay's entry: this replay's input must not be looked at after it.
    No two slots of a step are the same.
    """
    is_simulated = simulated is not None and rows_per_slot > 1
    rounds = simulated if simulated is not None else SimulatedRounds(state.length, state.length)
    _commit[(row_slot.shape[0] // rows_per_slot,)](
        row_slot, row_token, buffers.chosen, buffers.chosen_logprob, buffers.top_token, buffers.top_logprob,
        state.length, state.last_token, state.finish, state.max_length,
        slots.flags, slots.num_logprobs, slots.stop_bits, slots.counts,
        emitted, outbox, current, next_index, *outbox.shape, slots.vocab_size, slots.stop_bits.shape[1],
        rounds.trace, rounds.num_rounds, rounds.trace.shape[0], rounds.stride,
        rows_per_slot, is_simulated, uses_pdl(),
        num_warps=1, **launch_options(),
    )  # fmt: skip
