"""Slot tables and inputs of steps, on the device.

The slot tables have a tensor for each column and a row for each slot. S: number of slots. V: vocabulary
size. W = ceil(V / 32): words of a set of tokens, one bit a token.

A replayed graph reads its own input from a ring. The host writes the input of a replay into the next entry
of a ring in pinned memory. The replay's first kernel, `enter`, reads that entry over the bus: this is the
only copy. An index on the device, of which the host keeps a copy in step, tells which entry it is, so one
captured graph serves any number of replays in flight. One kernel at the end of each replay (`advance`,
`show_drafts` or `commit`) moves the index on, around the ring: the index stays in [0, num_entries) however
many replays there have been.

An entry is int32 words: HEADER_WORDS words, of which the first is the number of updates; `max_updates`
places in the slot tables; `max_updates` values; the payload.

The first kernel of a decode round after `enter`, `_gather_rows`, makes the rows of a step of its slots. Every
slot has the same number of rows, at consecutive positions: the row of its newest token, then one row for
each token that may be drafted behind it.

| kernel | grid | a program owns | bytes |
|---|---|---|---|
| `_enter` | 1 + payload tiles | program 0: all updates; others: one tile | 12 an update, 8 a word |
| `_advance` | 1 | the index | 8 |
| `_show_drafts` | 1 | all rows | 12 a row |
| `_copy_masks` | rows | the mask of its row | 8 a word, of rows under a constraint |
| `_gather_rows` | 1 | all rows | 24 a slot, 12 a row |

Programmatic dependent launch: every kernel waits for its producers before its first read. `_enter`,
`_copy_masks` and `_gather_rows` are short and let their dependents start right after that. `_advance` and
`_show_drafts` are the last kernels of a replay and let nothing start early.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)


class SlotFlag(IntFlag):
    """The rules that apply to a slot's logits. Sampling reads a table [S, V] or [S, W] only for slots that
    have the table's flag."""

    BIAS = 1
    """`SlotColumns.bias` is added."""
    PENALTIES = 2
    """Repetition, frequency and presence penalties apply: `counts` and `prompt_bits` are kept up to date."""
    ALLOWED = 4
    """Only the tokens of `allowed_bits` may be chosen."""
    CONSTRAINT = 8
    """Only the tokens of the row's own mask, which the host computes from a grammar, may be chosen."""
    STOPS = 16
    """There are stop ids: they are in `stop_bits`."""


def num_mask_words(vocab_size: int) -> int:
    """Number of 32-bit words that hold one bit a token: token i is bit i % 32 of word i // 32."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """The columns that sampling reads. Where nothing else is said a column is [S] and means what the field of
    the same name of `SlotSampling` means.

    bias, counts, prompt_bits and allowed_bits are undefined for slots without the flag. stop_bits is defined
    for every slot in use, since the commit kernel reads it whatever the flags are.
    """

    temperature: Tensor
    """fp32 [S]."""
    top_k: Tensor
    """int32 [S]; 0: off."""
    top_p: Tensor
    """fp32 [S]."""
    min_p: Tensor
    """fp32 [S]."""
    seed: Tensor
    """int64 [S]."""
    flags: Tensor
    """int32 [S]: a `SlotFlag`; STOPS is set where there are any stop ids."""
    min_length: Tensor
    """int32 [S]."""
    num_prompt_tokens: Tensor
    """int32 [S]."""
    presence_penalty: Tensor
    """fp32 [S]."""
    frequency_penalty: Tensor
    """fp32 [S]."""
    repetition_penalty: Tensor
    """fp32 [S]."""
    num_logprobs: Tensor
    """int32 [S]; -1: none are reported."""
    bias: Tensor
    """fp32 [S, V]: the addend of every token's logit."""
    counts: Tensor
    """int32 [S, V]: how often each token was generated."""
    prompt_bits: Tensor
    """int32 [S, W]: the tokens that occur in the prompt."""
    stop_bits: Tensor
    """int32 [S, W]: the stop ids."""
    allowed_bits: Tensor
    """int32 [S, W]: the tokens that are allowed."""

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> SlotColumns:
        """Columns of zeros: greedy slots without rules, once `num_logprobs` and `top_p` are set too."""

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        num_words = num_mask_words(vocab_size)
        return cls(
            temperature=column(torch.float32),
            top_k=column(torch.int32),
            top_p=column(torch.float32),
            min_p=column(torch.float32),
            seed=column(torch.int64),
            flags=column(torch.int32),
            min_length=column(torch.int32),
            num_prompt_tokens=column(torch.int32),
            presence_penalty=column(torch.float32),
            frequency_penalty=column(torch.float32),
            repetition_penalty=column(torch.float32),
            num_logprobs=column(torch.int32),
            bias=column(torch.float32, vocab_size),
            counts=column(torch.int32, vocab_size),
            prompt_bits=column(torch.int32, num_words),
            stop_bits=column(torch.int32, num_words),
            allowed_bits=column(torch.int32, num_words),
        )

    def check(self) -> None:
        """Raises ValueError for a column of another shape or type, or one that is not contiguous."""
        num_slots, vocab_size = self.num_slots, self.vocab_size
        num_words = num_mask_words(vocab_size)
        for name in ("top_k", "flags", "min_length", "num_prompt_tokens", "num_logprobs"):
            check_tensor(name, getattr(self, name), (num_slots,), torch.int32)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            check_tensor(name, getattr(self, name), (num_slots,), torch.float32)
        check_tensor("seed", self.seed, (num_slots,), torch.int64)
        check_tensor("bias", self.bias, (num_slots, vocab_size), torch.float32)
        check_tensor("counts", self.counts, (num_slots, vocab_size), torch.int32)
        for name in ("prompt_bits", "stop_bits", "allowed_bits"):
            check_tensor(name, getattr(self, name), (num_slots, num_words), torch.int32)

    @property
    def num_slots(self) -> int:
        return self.temperature.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.counts.shape[1]


class SlotState(Struct, frozen=True):
    """The columns that the commit kernel advances, int32 [S] each."""

    length: Tensor
    """Number of tokens of the sequence, prompt and generated."""
    last_token: Tensor
    """The newest token."""
    finish: Tensor
    """0 while the sequence runs; else why it ended: FINISHED_STOP or FINISHED_LENGTH."""
    max_length: Tensor
    """The most tokens that the sequence may have; never written by a kernel."""

    def check(self) -> None:
        """Raises ValueError for a column of another shape or type, or one that is not contiguous."""
        (num_slots,) = self.length.shape
        for name in ("length", "last_token", "finish", "max_length"):
            check_tensor(name, getattr(self, name), (num_slots,), torch.int32)


HEADER_WORDS = 4
"""The number of updates, and three unused words: the places begin at 16 bytes, the widest load."""
COPY_WORDS = 1024
"""Payload or mask words a program copies at a time: 8 a thread of 4 warps, two loads of 16 bytes."""
MIN_PADDED_ROWS = 16
"""Least number of rows that `_show_drafts` is compiled for: steps of 1 to 16 rows share one."""
CONSTRAINT = tl.constexpr(SlotFlag.CONSTRAINT.value)


@device_function
def entry_after(entry_index, num_entries):
    """The index of the ring's entry after `entry_index`."""
    return tl.where(entry_index + 1 == num_entries, 0, entry_index + 1)


@kernel(do_not_specialize=["payload_words"])
def _enter(
    input_ring_ptr,  # [num_entries, entry_words] int32, pinned
    next_entry_ptr,  # [1] int32: the entry of this replay
    current_entry_ptr,  # [1] int32, written: the same, for the replay's other kernels
    payload_ptr,  # [payload_words] int32, written
    table_words_ptr,  # int32, written: the arena of the slot tables
    entry_words,
    payload_words,
    HEADER_WORDS: tl.constexpr,
    MAX_UPDATES: tl.constexpr,
    PADDED_UPDATES: tl.constexpr,  # MAX_UPDATES as a power of two
    TILE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1 + tiles of the payload,). Program 0 makes the updates, each other one copies a tile."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    entry_index = tl.load(next_entry_ptr)
    entry_ptr = input_ring_ptr + entry_index.to(tl.int64) * entry_words
    program = tl.program_id(0)
    if program == 0:
        update = tl.arange(0, PADDED_UPDATES)
        is_update = update < tl.load(entry_ptr)
        place = tl.load(entry_ptr + HEADER_WORDS + update, mask=is_update, other=0)
        value = tl.load(entry_ptr + HEADER_WORDS + MAX_UPDATES + update, mask=is_update, other=0)
        tl.store(table_words_ptr + place, value, mask=is_update)
        tl.store(current_entry_ptr, entry_index)
    else:
        word = (program - 1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
        is_word = word < payload_words
        values = tl.load(entry_ptr + HEADER_WORDS + 2 * MAX_UPDATES + word, mask=is_word, other=0)
        tl.store(payload_ptr + word, values, mask=is_word)


@kernel
def _advance(
    next_entry_ptr,  # [1] int32, read and written
    num_entries,
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    tl.store(next_entry_ptr, entry_after(tl.load(next_entry_ptr), num_entries))


@kernel(do_not_specialize=["num_rows"])
def _show_drafts(
    row_slot_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    output_ring_ptr,  # [num_entries, entry_words] int32, pinned, written
    current_entry_ptr,  # [1] int32
    next_entry_ptr,  # [1] int32, read and written
    num_rows,
    num_entries,
    entry_words,
    PADDED_ROWS: tl.constexpr,  # R as a power of two
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    row = tl.arange(0, PADDED_ROWS)
    is_row = row < num_rows
    slot = tl.load(row_slot_ptr + row, mask=is_row, other=-1)
    token = tl.load(row_token_ptr + row, mask=is_row & (slot >= 0), other=-1)
    entry_ptr = output_ring_ptr + tl.load(current_entry_ptr).to(tl.int64) * entry_words
    tl.store(entry_ptr + row, token, mask=is_row)
    tl.store(next_entry_ptr, entry_after(tl.load(next_entry_ptr), num_entries))


@kernel
def _copy_masks(
    row_slot_ptr,  # [R] int32
    flags_ptr,  # [S] int32
    source_ptr,  # [num_entries, M, W] int32, or [M, W] without current_entry_ptr; pinned
    current_entry_ptr,  # [1] int32, or None
    row_mask_ptr,  # [R, W] int32, written
    entry_words,  # words from an entry of source to the next
    num_words,  # W
    ROWS_PER_MASK: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    flags = tl.load(flags_ptr + slot, mask=slot >= 0, other=0)
    if (flags & CONSTRAINT) != 0:
        mask_ptr = source_ptr + row // ROWS_PER_MASK * num_words
        if current_entry_ptr is not None:
            mask_ptr += tl.load(current_entry_ptr).to(tl.int64) * entry_words
        for first_word in range(0, num_words, CHUNK_WORDS):
            word = first_word + tl.arange(0, CHUNK_WORDS)
            is_word = word < num_words
            bits = tl.load(mask_ptr + word, mask=is_word, other=0)
            tl.store(row_mask_ptr + row * num_words + word, bits, mask=is_word)


def enter(
    input_ring: Tensor,
    next_entry: Tensor,
    current_entry: Tensor,
    payload: Tensor,
    table_words: Tensor,
    *,
    max_updates: int,
) -> None:
    """Make the updates of this replay's entry in the slot tables, and copy its payload to the device.

    input_ring [num_entries, entry_words], pinned. next_entry [1]: the index of this replay's entry, which
    current_entry [1] gets. payload [P]: P may be 0, or less than the entry's payload. table_words [N]: the
    arena of the slot tables; the updates have distinct places in it. All int32.

    Raises ValueError for another shape or type.
    """
    num_entries, entry_words = input_ring.shape
    (num_words,) = payload.shape
    check_tensor("input_ring", input_ring, (num_entries, entry_words), torch.int32)
    check_tensor("next_entry", next_entry, (1,), torch.int32)
    check_tensor("current_entry", current_entry, (1,), torch.int32)
    check_tensor("payload", payload, (num_words,), torch.int32)
    check_tensor("table_words", table_words, table_words.shape, torch.int32)
    room = entry_words - HEADER_WORDS - 2 * max_updates
    if num_words > room:
        raise ValueError(f"payload: {num_words} words: expected at most the entry's {room}")

    _enter[(1 + cdiv(num_words, COPY_WORDS),)](
        input_ring,
        next_entry,
        current_entry,
        payload,
        table_words,
        entry_words,
        num_words,
        HEADER_WORDS=HEADER_WORDS,
        MAX_UPDATES=max_updates,
        PADDED_UPDATES=next_power_of_2(max_updates),
        TILE_WORDS=COPY_WORDS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


def advance(next_entry: Tensor, num_entries: int) -> None:
    """Move next_entry [1] int32 on to the next replay's entry of `num_entries`: the last kernel of a replay
    without `commit` and `show_drafts`, which do the same.

    Raises ValueError for another shape or type.
    """
    check_tensor("next_entry", next_entry, (1,), torch.int32)
    _advance[(1,)](next_entry, num_entries, PDL=uses_pdl(), num_warps=1, **launch_options())


def copy_masks(
    row_slot: Tensor,
    flags: Tensor,
    source: Tensor,
    current_entry: Tensor | None,
    masks: Tensor,
    *,
    rows_per_mask: int,
) -> None:
    """Copy the masks of rows whose slot is under a constraint; other rows of `masks` are not written.

    row_slot [R], -1: padding. flags [S]: a `SlotFlag`. source: [num_entries, M, W], of which the entry
    current_entry [1] is read; or [M, W], where current_entry is None; pinned. Mask m is that of rows
    m * rows_per_mask and the rows_per_mask - 1 behind it. masks [R, W], written. All int32.

    Raises ValueError for another shape or type.
    """
    num_rows, num_words = masks.shape
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("flags", flags, flags.shape, torch.int32)
    num_masks = source.shape[-2]
    if current_entry is None:
        check_tensor("source", source, (num_masks, num_words), torch.int32)
    else:
        check_tensor("current_entry", current_entry, (1,), torch.int32)
        check_tensor("source", source, (source.shape[0], num_masks, num_words), torch.int32)
    check_tensor("masks", masks, (num_rows, num_words), torch.int32)
    _copy_masks[(num_rows,)](
        row_slot,
        flags,
        source,
        current_entry,
        masks,
        source.stride(0),
        num_words,
        ROWS_PER_MASK=rows_per_mask,
        CHUNK_WORDS=COPY_WORDS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


def show_drafts(
    row_slot: Tensor, row_token: Tensor, output_ring: Tensor, current_entry: Tensor, next_entry: Tensor
) -> None:
    """Write the tokens of rows [R] for the host, -1 where a row has no slot, and end the replay.

    They are the first R words of entry current_entry [1] of output_ring [num_entries, entry_words], pinned.
    next_entry [1] moves on to the next replay's entry, as by `commit`. All int32.

    Raises ValueError for another shape or type.
    """
    (num_rows,), (num_entries, entry_words) = row_slot.shape, output_ring.shape
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("row_token", row_token, (num_rows,), torch.int32)
    check_tensor("output_ring", output_ring, (num_entries, entry_words), torch.int32)
    check_tensor("current_entry", current_entry, (1,), torch.int32)
    check_tensor("next_entry", next_entry, (1,), torch.int32)
    if num_rows > entry_words:
        raise ValueError(f"output_ring: {entry_words} words an entry: expected at least {num_rows}")

    _show_drafts[(1,)](
        row_slot,
        row_token,
        output_ring,
        current_entry,
        next_entry,
        num_rows,
        num_entries,
        entry_words,
        PADDED_ROWS=max(MIN_PADDED_ROWS, next_power_of_2(num_rows)),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


@kernel(
    do_not_specialize=["num_rows", "rows_per_slot"],
    do_not_specialize_on_alignment=["max_drafts_ptr"],
)
def _gather_rows(
    slots_ptr,  # [B] int32; -1: none
    max_drafts_ptr,  # [B] int32; not read where rows_per_slot is 1
    length_ptr,  # [S] int32
    last_token_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    max_length_ptr,  # [S] int32
    row_slot_ptr,  # [R] int32, written
    row_token_ptr,  # [R] int32, written
    row_position_ptr,  # [R] int32, written
    num_rows,
    rows_per_slot,
    PADDED_ROWS: tl.constexpr,  # R as a power of two
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.arange(0, PADDED_ROWS)
    is_row = row < num_rows
    depth = row % rows_per_slot
    is_draft = is_row & (depth > 0)
    slot = tl.load(slots_ptr + row // rows_per_slot, mask=is_row, other=-1)
    is_live = slot >= 0
    is_live &= tl.load(finish_ptr + slot, mask=is_live, other=1) == 0
    num_tokens = tl.load(length_ptr + slot, mask=is_live, other=1)
    token = tl.load(last_token_ptr + slot, mask=is_live & (depth == 0), other=-1)
    # A draft is verified only where there is room for the token behind it.
    max_depth = tl.load(max_drafts_ptr + row // rows_per_slot, mask=is_draft, other=0)
    room = tl.load(max_length_ptr + slot, mask=is_live & is_draft, other=0) - num_tokens - 1
    is_live &= (depth == 0) | (depth <= tl.minimum(max_depth, room))
    tl.store(row_slot_ptr + row, tl.where(is_live, slot, -1), mask=is_row)
    tl.store(row_token_ptr + row, token, mask=is_row)
    tl.store(row_position_ptr + row, num_tokens - 1 + depth, mask=is_row)


def gather_rows(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
) -> None:
    """Write R / B rows for each of slots [B] (-1: none), at consecutive positions.

    The first row of a slot is that of its newest token. At most max_drafts [B] rows follow it, and no more
    than leave room for a token behind the last; row_token of these is -1 until they are drafted. Rows beyond,
    and all rows of a slot that has finished, get slot -1. row_slot, row_token, row_position [R], written. All
    int32. max_drafts is not read where R is B.

    Raises ValueError for another shape or type.
    """
    (num_rows,), (num_slots,) = row_slot.shape, slots.shape
    check_tensor("slots", slots, (num_slots,), torch.int32)
    check_tensor("max_drafts", max_drafts, (num_slots,), torch.int32)
    state.check()
    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)
    if num_rows % num_slots:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {num_slots}")

    _gather_rows[(1,)](
        slots,
        max_drafts,
        state.length,
        state.last_token,
        state.finish,
        state.max_length,
        row_slot,
        row_token,
        row_position,
        num_rows,
        num_rows // num_slots,
        PADDED_ROWS=max(MIN_PADDED_ROWS, next_power_of_2(num_rows)),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
