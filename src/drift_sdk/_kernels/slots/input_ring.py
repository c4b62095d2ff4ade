"""What a replayed graph takes from the host, and how it knows which entry of the ring is its own.

The host writes a replay's input into the next entry of a ring in pinned memory, and the replay's first kernel
reads it over the bus: the one copy in. An index on the device, in step with the host's, says which entry that
is, so one captured graph serves any number of replays in flight. Each replay's last kernel moves it on,
around the ring: it never leaves [0, num_entries), however many replays there have been.

An entry: the number of updates, their places, their values, then the payload, all int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.slots.slot_columns import SlotFlag, SlotState

__all__ = ["HEADER_WORDS", "advance", "copy_masks", "enter", "gather_rows", "next_entry", "show_drafts"]

HEADER_WORDS = 4
CHUNK = 1024
CONSTRAINT = tl.constexpr(SlotFlag.CONSTRAINT.value)


@triton.jit
def next_entry(index, num_entries):
    """The ring's entry after entry `index`."""
    return tl.where(index + 1 == num_entries, 0, index + 1)


@triton.jit
def _enter(
    ring, next_index, current, inbox, words, entry_words,
    HEADER: tl.constexpr, UPDATES: tl.constexpr, PADDED_UPDATES: tl.constexpr, PAYLOAD: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 makes the updates, the others bring a chunk of the payload each."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    index = tl.load(next_index)
    entry = ring + index.to(tl.int64) * entry_words
    program = tl.program_id(0)
    if program == 0:
        update = tl.arange(0, PADDED_UPDATES)
        is_update = update < tl.load(entry)
        place = tl.load(entry + HEADER + update, mask=is_update, other=0)
        value = tl.load(entry + HEADER + UPDATES + update, mask=is_update, other=0)
        tl.store(words + place, value, mask=is_update)
        tl.store(current, index)
    else:
        word = (program - 1) * CHUNK + tl.arange(0, CHUNK)
        payload = tl.load(entry + HEADER + 2 * UPDATES + word, mask=word < PAYLOAD, other=0)
        tl.store(inbox + word, payload, mask=word < PAYLOAD)


@triton.jit
def _advance(next_index, num_entries, PDL: tl.constexpr):
    wait_for_producers(PDL)
    tl.store(next_index, next_entry(tl.load(next_index), num_entries))


@triton.jit
def _gather_rows(
    slots, max_drafts, length, last_token, finish, max_length, row_slot, row_token, row_position, num_rows,
    ROWS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.arange(0, PADDED)
    is_row = row < num_rows
    depth = row % ROWS
    slot = tl.load(slots + row // ROWS, mask=is_row, other=-1)
    is_live = slot >= 0
    is_live &= tl.load(finish + slot, mask=is_live, other=1) == 0
    num_tokens = tl.load(length + slot, mask=is_live, other=1)
    token = tl.load(last_token + slot, mask=is_live & (depth == 0), other=-1)
    if ROWS > 1:
        # A draft is verified only where the token behind it still has room.
        most = tl.load(max_drafts + row // ROWS, mask=is_row, other=0)
        most = tl.minimum(most, tl.load(max_length + slot, mask=is_live, other=0) - num_tokens - 1)
        is_live &= (depth == 0) | (depth <= most)
    tl.store(row_slot + row, tl.where(is_live, slot, -1), mask=is_row)
    tl.store(row_token + row, token, mask=is_row)
    tl.store(row_position + row, num_tokens - 1 + depth, mask=is_row)


@triton.jit
def _show_drafts(
    row_slot, row_token, outbox, current, next_index, num_rows, num_entries, outbox_words,
    PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    row = tl.arange(0, PADDED)
    is_row = row < num_rows
    slot = tl.load(row_slot + row, mask=is_row, other=-1)
    token = tl.load(row_token + row, mask=is_row & (slot >= 0), other=-1)
    entry = outbox + tl.load(current).to(tl.int64) * outbox_words
    tl.store(entry + row, token, mask=is_row)
    tl.store(next_index, next_entry(tl.load(next_index), num_entries))


@triton.jit
def _copy_masks(
    row_slot, flags, ring, current, masks, entry_words, num_words,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    flag = tl.load(flags + slot, mask=slot >= 0, other=0)
    if (flag & CONSTRAINT) != 0:
        source = ring + row // ROWS * num_words
        if current is not None:
            source += tl.load(current).to(tl.int64) * entry_words
        for first in range(0, num_words, CHUNK):
            word = first + tl.arange(0, CHUNK)
            bits = tl.load(source + word, mask=word < num_words, other=0)
            tl.store(masks + row * num_words + word, bits, mask=word < num_words)


def enter(
    ring: Tensor, next_index: Tensor, current: Tensor, inbox: Tensor, words: Tensor, *, max_updates: int
) -> None:
    """Make the updates of the replay's own entry in the slot table `words`, and bring its payload to `inbox`.

    ring [num_entries, entry_words] pinned, next_index and current [1], inbox [P], words: all int32. Updates
    have distinct places. `current` gets the entry's index. P may be 0, or less than the entry's payload.
    """
    num_words = inbox.shape[0]
    _enter[(1 + triton.cdiv(num_words, CHUNK),)](
        ring, next_index, current, inbox, words, ring.shape[1],
        HEADER_WORDS, max_updates, triton.next_power_of_2(max_updates), num_words, CHUNK, uses_pdl(),
        num_warps=4, **launch_options(),
    )  # fmt: skip


def advance(next_index: Tensor, num_entries: int) -> None:
    """Move on to the next replay's entry: the last kernel of each replay, unless that does it itself."""
    _advance[(1,)](next_index, num_entries, uses_pdl(), num_warps=1, **launch_options())


def copy_masks(
    row_slot: Tensor,
    flags: Tensor,
    source: Tensor,
    current: Tensor | None,
    masks: Tensor,
    *,
    rows_per_mask: int,
) -> None:
    """What rows of slots under a constraint may say, to masks [R, W]: from entry `current` of source
    [E, M, W], or from source [M, W] without it, in which a mask stands for `rows_per_mask` rows. Others'
    are not looked at."""
    num_rows, num_words = masks.shape
    _copy_masks[(num_rows,)](
        row_slot, flags, source, current, masks, source.stride(0), num_words, rows_per_mask, CHUNK,
        uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip


def gather_rows(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
) -> None:
    """As many rows R / B for each of slots [B] (-1: none) at consecutive positions, the first that of its
    newest token; slot -1 if the slot has finished, or has no use for the row: at most max_drafts [B] follow
    the first. The others' tokens are -1 until they are drafted. The rows [R]; all int32."""
    num_rows = row_slot.shape[0]
    _gather_rows[(1,)](
        slots, max_drafts, state.length, state.last_token, state.finish, state.max_length,
        row_slot, row_token, row_position, num_rows, num_rows // slots.shape[0],
        max(16, triton.next_power_of_2(num_rows)), uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip


def show_drafts(
    row_slot: Tensor, row_token: Tensor, outbox: Tensor, current: Tensor, next_index: Tensor
) -> None:
    """Leave the tokens of rows [R] for the host, -1 where there is none: the first R words of entry `current`
    of outbox [E, words]. It moves on to the next replay's entry, as `commit` does. All int32."""
    num_rows = row_slot.shape[0]
    _show_drafts[(1,)](
        row_slot, row_token, outbox, current, next_index, num_rows, *outbox.shape,
        max(16, triton.next_power_of_2(num_rows)), uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip
