"""The blocks of sequences that get the largest shares of attention, in ascending order.

Grid: (sequences,). A program adds the shares of a sequence's heads, in their order, finds the smallest share
that is still selected, bit by bit (shares are not negative, so their bits are in their order), and writes the
numbers of the blocks above it; of equal shares at the border the first blocks. Bytes: 4 for each block and
head, and 4 for each block selected.

Dependent launch: the kernel waits for its producers before its first read and lets its dependents start right
after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk.partial_verification import ViewLayout

__all__ = ["select_blocks"]

TOP_BIT, NUM_BITS = tl.constexpr(1 << 30), tl.constexpr(31)
"""The highest bit of a number that is not negative, and how many there are."""


@kernel(do_not_specialize=["max_blocks"])
def _select_blocks(
    shares_ptr,  # [B, NUM_KV_HEADS, max_blocks] fp32
    row_slot_ptr,  # [B * ROWS] int32; -1: padding row
    row_position_ptr,  # [B * ROWS] int32: the newest token's first
    selected_ptr,  # [S, NUM_RETRIEVED] int32, written
    max_blocks,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_RETRIEVED: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,  # max_blocks as a power of two
    PDL: tl.constexpr,
):
    """Program (sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(row_slot_ptr + sequence * ROWS)
    position = tl.load(row_position_ptr + sequence * ROWS)
    window_block = tl.maximum(position + 1 - WINDOW_TOKENS, 0) // BLOCK_SIZE
    if (slot >= 0) & (window_block > NUM_SINKS + NUM_RETRIEVED):
        block = tl.arange(0, PADDED_BLOCKS)
        is_candidate = (block >= NUM_SINKS) & (block < window_block)
        share = tl.zeros((PADDED_BLOCKS,), tl.float32)
        own_ptr = shares_ptr + sequence.to(tl.int64) * NUM_KV_HEADS * max_blocks + block
        for head in range(NUM_KV_HEADS):
            share += tl.load(own_ptr + head * max_blocks, mask=is_candidate, other=0.0)
        # A share that is not a number counts as none, so that as many blocks as expected are selected.
        share = tl.where(share >= 0.0, share, 0.0)
        bits = tl.where(is_candidate, share.to(tl.int32, bitcast=True), -1)
        border = position * 0
        bit = border + TOP_BIT
        for _ in range(NUM_BITS):
            raised = border | bit
            bit = bit >> 1
            border = tl.where(tl.sum((bits >= raised).to(tl.int32)) >= NUM_RETRIEVED, raised, border)
        is_above = bits > border
        is_equal = bits == border
        num_equal = NUM_RETRIEVED - tl.sum(is_above.to(tl.int32))
        is_selected = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal))
        place = tl.cumsum(is_selected.to(tl.int32), 0) - 1
        tl.store(selected_ptr + slot.to(tl.int64) * NUM_RETRIEVED + place, block, mask=is_selected)


def select_blocks(
    shares: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    selected: Tensor,
    layout: ViewLayout,
) -> None:
    """Write the retrieved blocks of B sequences in a layer: those with the largest shares between the first
    blocks and the window.

    shares [B, num_kv_heads, max_blocks] fp32. row_slot, row_position [B * T] int32: T rows of each sequence,
    of which the first is the newest token's. selected [S, layout.num_retrieved] int32, written for the slots
    of sequences that have more blocks than views have, ascending.
    Raises ValueError for another shape, type or layout.
    """
    num_sequences, num_kv_heads, max_blocks = shares.shape
    rows = row_slot.shape[0] // num_sequences
    check_tensor("shares", shares, shares.shape, torch.float32)
    check_tensors((num_sequences * rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("selected", selected, (selected.shape[0], layout.num_retrieved), torch.int32)
    padded_blocks = next_power_of_2(max_blocks)
    _select_blocks[(num_sequences,)](
        shares,
        row_slot,
        row_position,
        selected,
        max_blocks,
        ROWS=rows,
        NUM_KV_HEADS=num_kv_heads,
        NUM_SINKS=layout.num_sinks,
        NUM_RETRIEVED=layout.num_retrieved,
        WINDOW_TOKENS=layout.window_tokens,
        BLOCK_SIZE=layout.block_size,
        PADDED_BLOCKS=padded_blocks,
        PDL=uses_pdl(),
        num_warps=min(32, max(8, padded_blocks // 512)),
        **launch_options(),
    )
