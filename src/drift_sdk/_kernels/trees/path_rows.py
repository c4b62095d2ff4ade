"""The rows of accepted paths: what a draft computes after a round of trees, and the hidden states for it.

Row e of a tree's path is that of its node of depth e, as far as a token was emitted behind it. As in
draft_rows.py, the row that pairs the feature of position p with the token of position p + 1 has position
p + 1.

`_path_rows`, grid (trees,): a program owns the rows of a path. `_gather_hidden`, grid (rows,): a program
copies a row. Bytes: 16 a row of a path in, 16 out; a row of hidden states in and out.

Programmatic dependent launch: both wait for their producers before their first read and, being short, let
their dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_range, check_rows, check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.layers.rms_norm import norm_warps
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["gather_hidden", "path_rows"]


@kernel
def _path_rows(
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    chosen_ptr,  # [R] int32
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32
    draft_slot_ptr,  # [B * NUM_ROWS] int32, written
    draft_token_ptr,  # likewise
    draft_position_ptr,
    source_ptr,
    NUM_NODES: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # of a path
    PADDED_ROWS: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    entry = tl.arange(0, PADDED_ROWS)
    is_entry = entry < NUM_ROWS
    node = tl.load(path_ptr + tree * NUM_PATH_ENTRIES + entry, mask=is_entry, other=-1)
    is_live = node >= 0
    row = tree * NUM_NODES + node
    slot = tl.load(row_slot_ptr + row, mask=is_live, other=-1)
    token = tl.load(chosen_ptr + row, mask=is_live, other=-1)
    position = tl.load(row_position_ptr + row, mask=is_live, other=-1)
    place = tree * NUM_ROWS + entry
    tl.store(draft_slot_ptr + place, tl.where(token < 0, -1, slot), mask=is_entry)
    tl.store(draft_token_ptr + place, token, mask=is_entry)
    tl.store(draft_position_ptr + place, position + 1, mask=is_entry)
    tl.store(source_ptr + place, tl.where(is_live, row, -1), mask=is_entry)


@kernel
def _gather_hidden(
    source_ptr,  # [M] int32; -1: none
    hidden_ptr,  # [N, SIZE]
    out_ptr,  # [M, SIZE], written
    hidden_stride,
    out_stride,
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # SIZE as a power of two
    PDL: tl.constexpr,
):
    """Grid (M,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + row).to(tl.int64)
    column = tl.arange(0, PADDED_COLUMNS)
    is_loaded = column < tl.where(source >= 0, SIZE, 0)
    values = tl.load(hidden_ptr + source * hidden_stride + column, mask=is_loaded, other=0.0)
    tl.store(out_ptr + row * out_stride + column, values, mask=column < SIZE)


def path_rows(
    row_slot: Tensor,
    row_position: Tensor,
    chosen: Tensor,
    path: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    nodes_per_tree: int,
) -> None:
    """Write the rows (slot, token, position, source) [B * E] that a draft computes of the paths of B trees.

    row_slot, row_position [B * T]: of the round's rows. chosen [B * T]: the token behind each row. path [B,
    PATH_ENTRIES]: as of `tree_accept`; of a path the first E entries, which are all that are not -1. out,
    written: the token is the chosen one, the position that of this token, the source the round's row; slot
    and source are -1 behind the path. All int32. Raises ValueError for another shape or type.
    """
    num_trees = path.shape[0]
    num_rows = out[0].shape[0] // num_trees
    check_range("rows of a path", num_rows, 1, PATH_ENTRIES)
    check_tensors(
        (num_trees * nodes_per_tree,),
        torch.int32,
        row_slot=row_slot,
        row_position=row_position,
        chosen=chosen,
    )
    check_tensor("path", path, (num_trees, PATH_ENTRIES), torch.int32)
    for name, tensor in zip(("slot", "token", "position", "source"), out, strict=True):
        check_tensor(name, tensor, (num_trees * num_rows,), torch.int32)
    _path_rows[(num_trees,)](
        row_slot,
        row_position,
        chosen,
        path,
        *out,
        NUM_NODES=nodes_per_tree,
        NUM_ROWS=num_rows,
        PADDED_ROWS=next_power_of_2(num_rows),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def gather_hidden(source: Tensor, hidden: Tensor, out: Tensor) -> None:
    """out[m] = hidden[source[m]], zeros where source is -1.

    source [M] int32. hidden [N, H], out [M, H] of one type; their rows may have any stride. Raises ValueError
    for another shape or type.
    """
    (num_rows,), size = source.shape, hidden.shape[1]
    check_tensor("source", source, (num_rows,), torch.int32)
    check_rows("hidden", hidden, hidden.shape, out.dtype)
    check_rows("out", out, (num_rows, size), out.dtype)
    _gather_hidden[(num_rows,)](
        source,
        hidden,
        out,
        hidden.stride(0),
        out.stride(0),
        SIZE=size,
        PADDED_COLUMNS=next_power_of_2(size),
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )
