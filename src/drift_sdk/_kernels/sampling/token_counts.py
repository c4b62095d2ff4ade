"""Counts of the tokens that a prefill brings in, which the penalties need.

Grid (tiles of rows,): a program owns TILE_ROWS rows. Rows of one slot may lie in several programs and hold
the same token, so sets and counts are updated by atomic operations; on integers, so the order in which
programs get there does not matter. Bytes: 12 a row, and up to 16 more for rows of slots with penalties.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

Reference: `LogitsProcessors.count` in execution.eager.logits_processors.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv
from drift_sdk._kernels.slots.slot_columns import SlotColumns, SlotFlag

__all__ = ["count_tokens"]

PENALTIES = tl.constexpr(SlotFlag.PENALTIES.value)

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
