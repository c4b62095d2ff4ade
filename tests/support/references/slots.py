"""References of the kernels of `drift_sdk._kernels.slots`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.slots import HEADER_WORDS, SlotFlag, SlotState


def gather_rows_reference(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
) -> None:
    """`gather_rows` in plain torch. Rows of no slot, or of a finished one, get positions from 0 on."""
    rows_per_slot = row_slot.shape[0] // slots.shape[0]
    depth = torch.arange(rows_per_slot, dtype=torch.int32, device=slots.device)
    slot = slots.clamp(min=0).long()
    is_live = (slots >= 0) & (state.finish[slot] == 0)
    length = state.length[slot].where(is_live, 1)
    max_depth = torch.minimum(max_drafts, state.max_length[slot] - length - 1).clamp(min=0)
    is_row = is_live[:, None] & (depth <= max_depth[:, None])
    is_newest = is_live[:, None] & (depth == 0)
    row_slot.copy_(slots[:, None].where(is_row, -1).flatten())
    row_token.copy_(state.last_token[slot][:, None].where(is_newest, -1).flatten())
    row_position.copy_((length[:, None] - 1 + depth).flatten())


def enter_reference(
    input_ring: Tensor,
    next_entry: Tensor,
    current_entry: Tensor,
    payload: Tensor,
    table_words: Tensor,
    *,
    max_updates: int,
) -> None:
    """`enter` in plain torch."""
    entry = input_ring[int(next_entry)].to(table_words.device)
    num_updates, words = int(entry[0]), entry[HEADER_WORDS:]
    table_words[words[:num_updates].long()] = words[max_updates : max_updates + num_updates]
    payload.copy_(words[2 * max_updates : 2 * max_updates + len(payload)])
    current_entry.copy_(next_entry)


def advance_reference(next_entry: Tensor, num_entries: int) -> None:
    """`advance` in plain torch."""
    next_entry.add_(1).remainder_(num_entries)


def copy_masks_reference(
    row_slot: Tensor,
    flags: Tensor,
    source: Tensor,
    current_entry: Tensor | None,
    masks: Tensor,
    *,
    rows_per_mask: int,
) -> None:
    """`copy_masks` in plain torch."""
    entry = source if current_entry is None else source[int(current_entry)]
    for row, slot in enumerate(row_slot.tolist()):
        if slot >= 0 and int(flags[slot]) & SlotFlag.CONSTRAINT:
            masks[row] = entry[row // rows_per_mask].to(masks.device)


def show_drafts_reference(
    row_slot: Tensor, row_token: Tensor, output_ring: Tensor, current_entry: Tensor, next_entry: Tensor
) -> None:
    """`show_drafts` in plain torch."""
    output_ring[int(current_entry), : len(row_slot)] = row_token.where(row_slot >= 0, -1).to(
        output_ring.device
    )
    advance_reference(next_entry, len(output_ring))
