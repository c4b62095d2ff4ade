"""Prompt look-up: what followed the last time a sequence said this. Reference: `speculation.ngram`.

A sequence's history is searched by several programs, block by block in turn; a second launch takes the best
of what they found. Bytes: 4 for each token of the history, then up to `max_length` times that from L1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["append_history", "num_searchers", "propose_ngrams"]

SEARCH_BLOCK = 1024
MAX_SEARCHERS = 32
APPEND_BLOCK = 256


@triton.jit
def _search(
    row_slot, row_position, row_token, history, found, history_stride,
    ROWS: tl.constexpr, MIN_LENGTH: tl.constexpr, MAX_LENGTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The longest run in this program's blocks, and of those the latest, as one number: length, then end."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    sequence, searcher = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot + sequence * ROWS)
    length = tl.load(row_position + sequence * ROWS) + 1
    length = tl.where(slot >= 0, length, 0)
    tokens = history + slot.to(tl.int64) * history_stride
    newest = tl.load(row_token + sequence * ROWS)
    best = tl.zeros([BLOCK], tl.int64)
    for first in range(searcher * BLOCK, length, tl.num_programs(1) * BLOCK):
        # A run of n tokens before `end` is like the last n; something follows it, so `end` is in the history.
        end = first + tl.arange(0, BLOCK)
        is_alike = end < length
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(1, MAX_LENGTH + 1):
            is_alike &= end >= back
            last = tl.load(tokens + length - back, mask=length >= back, other=-1) if back > 1 else newest
            is_alike &= tl.load(tokens + end - back, mask=is_alike, other=-2) == last
            run += is_alike.to(tl.int64)

        best = tl.maximum(best, tl.where(run >= MIN_LENGTH, (run << 32) + end, 0))

    tl.store(found + sequence * tl.num_programs(1) + searcher, tl.max(best))


@triton.jit
def _propose(
    row_slot, row_position, row_token, history, found, history_stride,
    SEARCHERS: tl.constexpr, PADDED_SEARCHERS: tl.constexpr, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(row_slot + sequence * ROWS)
    length = tl.load(row_position + sequence * ROWS) + 1
    searcher = tl.arange(0, PADDED_SEARCHERS)
    best = tl.max(tl.load(found + sequence * SEARCHERS + searcher, mask=searcher < SEARCHERS, other=0))
    end = tl.where(best > 0, best & 0x7FFFFFFF, length)
    draft = tl.arange(0, PADDED_ROWS)
    row = sequence * ROWS + 1 + draft
    is_draft = draft + 1 < tl.where(slot >= 0, ROWS, 0)
    own_slot = tl.load(row_slot + row, mask=is_draft, other=-1)
    is_proposed = (own_slot >= 0) & (end + draft < length)
    is_newest = is_proposed & (end + draft == length - 1)
    place = history + slot.to(tl.int64) * history_stride + end + draft
    token = tl.load(place, mask=is_proposed & (is_newest == 0), other=-1)
    token = tl.where(is_newest, tl.load(row_token + sequence * ROWS), token)
    tl.store(row_token + row, token, mask=is_draft)
    tl.store(row_slot + row, tl.where(is_proposed, own_slot, -1), mask=is_draft)


@triton.jit
def _append(
    row_slot, row_position, row_token, emitted, history, history_stride, num_rows,
    ROWS: tl.constexpr, HAS_EMITTED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(row_slot + row, mask=row < num_rows, other=-1)
    is_true = slot >= 0
    if HAS_EMITTED:
        is_true &= row % ROWS < tl.load(emitted + row // ROWS, mask=is_true, other=0)
    position = tl.load(row_position + row, mask=is_true, other=0)
    token = tl.load(row_token + row, mask=is_true, other=-1)
    tl.store(history + slot.to(tl.int64) * history_stride + position, token, mask=is_true)


def num_searchers(max_num_tokens: int) -> int:
    """How many programs search a history of so many tokens."""
    return min(-(-max_num_tokens // (2 * SEARCH_BLOCK)), MAX_SEARCHERS)


def propose_ngrams(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    found: Tensor,
    *,
    rows_per_slot: int,
    min_length: int,
    max_length: int,
) -> None:
    """Draft behind the first row of each `rows_per_slot` what followed in the past.

    row_slot, row_position, row_token [R] int32, the first row of each slot that of its newest token. history
    [S, max tokens] int32: the token at each position before it. found [R / rows_per_slot, num_searchers]
    int64: scratch.

    Sought is the longest run of `min_length` to `max_length` tokens that also ends the history, where it
    last occurred before. The tokens from there on go to `row_token` of the other rows that have a slot; rows
    for which there are none lose theirs. Raises ValueError for another shape, type or layout.
    """
    (num_rows,) = row_slot.shape
    num_sequences = num_rows // rows_per_slot
    if num_rows % rows_per_slot:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {rows_per_slot}")

    _check_rows(history, row_slot=row_slot, row_position=row_position, row_token=row_token)
    searchers = num_searchers(history.shape[1])
    check_tensor("found", found, (num_sequences, searchers), torch.int64)
    _search[(num_sequences, searchers)](
        row_slot, row_position, row_token, history, found, history.stride(0),
        rows_per_slot, min_length, max_length, SEARCH_BLOCK, uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip
    _propose[(num_sequences,)](
        row_slot, row_position, row_token, history, found, history.stride(0),
        searchers, triton.next_power_of_2(searchers), rows_per_slot, triton.next_power_of_2(rows_per_slot),
        uses_pdl(), num_warps=1, **launch_options(),
    )  # fmt: skip


def append_history(
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    history: Tensor,
    *,
    emitted: Tensor | None = None,
) -> None:
    """history[row_slot, row_position] = row_token, for rows [R] int32 with a slot.

    emitted [B] int32: of the R / B rows of each slot the first so many alone. Raises ValueError for another
    shape, type or layout.
    """
    (num_rows,) = row_slot.shape
    _check_rows(history, row_slot=row_slot, row_position=row_position, row_token=row_token)
    num_sequences = num_rows if emitted is None else emitted.shape[0]
    if num_rows % num_sequences:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of emitted's {num_sequences}")

    if emitted is not None:
        check_tensor("emitted", emitted, (num_sequences,), torch.int32)
    _append[(triton.cdiv(num_rows, APPEND_BLOCK),)](
        row_slot, row_position, row_token, row_slot if emitted is None else emitted, history,
        history.stride(0), num_rows, num_rows // num_sequences, emitted is not None, APPEND_BLOCK,
        uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip


def _check_rows(history: Tensor, **rows: Tensor) -> None:
    shape = rows["row_slot"].shape
    for name, tensor in rows.items():
        check_tensor(name, tensor, shape, torch.int32)
    check_rows("history", history, (history.shape[0], history.shape[1]), torch.int32)
