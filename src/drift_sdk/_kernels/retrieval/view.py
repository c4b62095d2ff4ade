"""Views of sequences for partial verification: block tables of a part of their blocks, one for each layer.

A view has the sequence's first blocks, the retrieved ones in ascending order, and those of the window (see
`ViewLayout`). Attention reads it like any block table, with the positions that keys have in the view.

Grid: (layers, sequences). A program makes the view of a sequence in a layer; those of layer 0 also write the
positions of the sequence's rows. Bytes: 8 for each block of a view, and 8 a row.

Dependent launch: the kernel waits for its producers before its first read and, being short, lets its
dependents start right after that. Attention reads views before it waits, several kernels later.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk.partial_verification import ViewLayout

__all__ = ["Retrieval", "view_blocks"]


class Retrieval(Struct, frozen=True):
    """The state of partial verification of S slots, int32.

    dropped [S]: blocks that the slot's views leave out; 0: none. pending [S]: rows whose keys and values
    partial rounds have written: those before the newest token. pending_token [S, refresh_tokens]: their
    tokens, in order. selected [L, S, num_retrieved]: of each layer, the numbers of retrieved blocks in the
    sequence, ascending; undefined where none are left out.
    """

    dropped: Tensor
    pending: Tensor
    pending_token: Tensor
    selected: Tensor

    def check(self, layout: ViewLayout) -> None:
        """Raises ValueError for a tensor of another shape or type, or one that is not contiguous."""
        num_layers, num_slots, _ = self.selected.shape
        check_tensors((num_slots,), torch.int32, dropped=self.dropped, pending=self.pending)
        check_tensor("pending_token", self.pending_token, (num_slots, layout.refresh_tokens), torch.int32)
        check_tensor("selected", self.selected, (num_layers, num_slots, layout.num_retrieved), torch.int32)


@kernel(do_not_specialize=["num_slots", "max_blocks"])
def _view_blocks(
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32
    block_table_ptr,  # [S, max_blocks] int32
    dropped_ptr,  # [S] int32
    selected_ptr,  # [L, S, NUM_RETRIEVED] int32
    view_ptr,  # [L, S, NUM_BLOCKS] int32, written for the rows' slots
    view_position_ptr,  # [R] int32, written
    num_slots,  # S
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,  # ROWS_PER_SEQUENCE as a power of two
    BLOCK_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_RETRIEVED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,  # NUM_BLOCKS as a power of two
    PDL: tl.constexpr,
):
    """Program (layer, sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    layer, sequence = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + sequence * ROWS_PER_SEQUENCE)
    is_live = slot >= 0
    dropped = tl.load(dropped_ptr + slot, mask=is_live, other=0)
    place = tl.arange(0, PADDED_BLOCKS)
    end = tl.where(dropped > 0, NUM_SINKS + NUM_RETRIEVED, 0)
    is_retrieved = (place >= NUM_SINKS) & (place < end)
    own_row = layer.to(tl.int64) * num_slots + slot
    selected = tl.load(selected_ptr + own_row * NUM_RETRIEVED + place - NUM_SINKS, mask=is_retrieved, other=0)
    following = tl.where(place < NUM_SINKS, place, place + dropped)
    index = tl.where(is_retrieved, selected, following)
    is_block = (place < tl.where(is_live, NUM_BLOCKS, 0)) & (index < max_blocks)
    block = tl.load(block_table_ptr + slot.to(tl.int64) * max_blocks + index, mask=is_block, other=0)
    tl.store(view_ptr + own_row * NUM_BLOCKS + place, block, mask=is_block)
    if layer == 0:
        depth = tl.arange(0, PADDED_ROWS)
        is_row = depth < ROWS_PER_SEQUENCE
        row = sequence * ROWS_PER_SEQUENCE + depth
        position = tl.load(row_position_ptr + row, mask=is_row, other=0)
        tl.store(view_position_ptr + row, position - dropped * BLOCK_SIZE, mask=is_row)


def view_blocks(
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    retrieval: Retrieval,
    view: Tensor,
    view_position: Tensor,
    layout: ViewLayout,
    *,
    rows_per_sequence: int,
) -> None:
    """Write the views of the slots of rows [R], and the rows' positions in them.

    row_slot, row_position [R]: `rows_per_sequence` consecutive rows a sequence, all behind the window's first
    key; a sequence whose first row has slot -1 has no view. block_table [S, max_blocks]. view [L, S,
    layout.num_blocks], written: entries beyond the block table are left as they are. view_position [R],
    written. All int32. Raises ValueError for another shape or type.
    """
    (num_rows,), (num_slots, max_blocks) = row_slot.shape, block_table.shape
    num_layers, num_blocks = retrieval.selected.shape[0], layout.num_blocks
    retrieval.check(layout)
    check_tensor("block_table", block_table, (num_slots, max_blocks), torch.int32)
    check_tensors(
        (num_rows,),
        torch.int32,
        row_slot=row_slot,
        row_position=row_position,
        view_position=view_position,
    )
    check_tensor("view", view, (num_layers, num_slots, num_blocks), torch.int32)
    _view_blocks[(num_layers, num_rows // rows_per_sequence)](
        row_slot,
        row_position,
        block_table,
        retrieval.dropped,
        retrieval.selected,
        view,
        view_position,
        num_slots,
        max_blocks,
        ROWS_PER_SEQUENCE=rows_per_sequence,
        PADDED_ROWS=next_power_of_2(rows_per_sequence),
        BLOCK_SIZE=layout.block_size,
        NUM_SINKS=layout.num_sinks,
        NUM_RETRIEVED=layout.num_retrieved,
        NUM_BLOCKS=num_blocks,
        PADDED_BLOCKS=next_power_of_2(num_blocks),
        PDL=uses_pdl(),
        num_warps=2,
        **launch_options(),
    )
