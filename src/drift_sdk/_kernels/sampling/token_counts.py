"""Counting the tokens that a prefill brings in, for the penalties. Reference: `LogitsProcessors.count`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.slots.slot_columns import SlotColumns, SlotFlag

__all__ = ["count_tokens"]

PENALTIES = tl.constexpr(SlotFlag.PENALTIES.value)

BLOCK = 256


@triton.jit
def _count_tokens(
    row_slot, row_token, row_position, flags, num_prompt_tokens, counts, prompt_bits, num_rows,
    VOCAB_SIZE: tl.constexpr, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(row_slot + row, mask=is_row, other=-1)
    token = tl.load(row_token + row, mask=is_row, other=-1)
    is_counted = (slot >= 0) & (token >= 0)
    is_counted &= (tl.load(flags + slot, mask=is_counted, other=0) & PENALTIES) != 0
    position = tl.load(row_position + row, mask=is_counted, other=0)
    is_prompt = position < tl.load(num_prompt_tokens + slot, mask=is_counted, other=0)
    # Integers: the order in which rows get here is of no matter.
    wide_slot = slot.to(tl.int64)
    word = prompt_bits + wide_slot * NUM_WORDS + token // 32
    tl.atomic_or(word, 1 << (token % 32), mask=is_counted & is_prompt, sem="relaxed")
    count = counts + wide_slot * VOCAB_SIZE + token
    tl.atomic_add(count, 1, mask=is_counted & (is_prompt == 0), sem="relaxed")


def count_tokens(row_slot: Tensor, row_token: Tensor, row_position: Tensor, slots: SlotColumns) -> None:
    """Mark each row's token as one of its slot's prompt, or count it as generated, by its position.

    row_slot, row_token, row_position [N] int32; rows of a negative slot or token, and of slots without
    penalties, change nothing. Raises ValueError for another shape or type.
    """
    (num_rows,) = row_slot.shape
    for name, tensor in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, tensor, (num_rows,), torch.int32)

    _count_tokens[(triton.cdiv(num_rows, BLOCK),)](
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
        BLOCK=BLOCK,
        PDL=uses_pdl(),
        **launch_options(),
    )
