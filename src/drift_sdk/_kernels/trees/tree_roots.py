"""The roots of a round's trees and the limits of their growth: the first kernel of a round of trees.

A tree has T rows, its nodes. Row 0 is the slot's newest token; the other rows have slot -1 until a draft
grows into them. A tree may have as many drafts as the plan says, and paths no longer than leave room for a
token behind the last draft. That of a slot under a constraint is a chain.

The draft computes some nodes of its own, in cache slots behind the blocks. Its list of nodes begins with the
root, whose keys and values lie in the slot's blocks.

Grid: (trees,). A program owns the rows of its tree and its list. Bytes: 28 a slot in, 16 a row and 8 for each
node of the draft out.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
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
from drift_sdk._kernels.slots.slot_columns import SlotFlag, SlotState

__all__ = ["LIMIT_WORDS", "RootTensors", "tree_roots"]

LIMIT_WORDS = 3
"""Words of a tree's limits: most drafts, most drafts on a path, and whether it must be a chain."""
CONSTRAINT = tl.constexpr(SlotFlag.CONSTRAINT.value)


class RootTensors(Struct, frozen=True):
    """The rows of B trees of T nodes, int32 [B * T] each, and what their growth starts from.

    slot (-1: no node), token, position, parent (number of a node in its tree; -1 for roots). Positions of
    drafts are not written by `tree_roots`. root_slot, root_position [B] int32: those of the roots alone.
    limits [B, LIMIT_WORDS] int32. draft_kv_slot [B * N] int64: cache slots of the nodes that the draft
    computes, the root being the first.
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    parent: Tensor
    root_slot: Tensor
    root_position: Tensor
    limits: Tensor
    draft_kv_slot: Tensor


@kernel
def _tree_roots(
    slots_ptr,  # [B] int32; -1: none
    max_drafts_ptr,  # [B] int32
    length_ptr,  # [S] int32
    last_token_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    max_length_ptr,  # [S] int32
    flags_ptr,  # [S] int32
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32, written
    row_token_ptr,  # [R] int32, written
    row_position_ptr,  # [R] int32, written for roots
    row_parent_ptr,  # [R] int32, written
    root_slot_ptr,  # [B] int32, written
    root_position_ptr,  # [B] int32, written
    limits_ptr,  # [B, LIMIT_WORDS] int32, written
    draft_kv_slot_ptr,  # [B * NUM_DRAFT_NODES] int64, written
    max_blocks,
    first_draft_slot,
    max_depth,
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_DRAFT_NODES: tl.constexpr,
    PADDED_DRAFT_NODES: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    LIMIT_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    slot = tl.load(slots_ptr + tree)
    is_live = slot >= 0
    is_live &= tl.load(finish_ptr + slot, mask=is_live, other=1) == 0
    num_tokens = tl.load(length_ptr + slot, mask=is_live, other=1)
    token = tl.load(last_token_ptr + slot, mask=is_live, other=-1)
    room = tl.load(max_length_ptr + slot, mask=is_live, other=0) - num_tokens - 1
    depth = tl.maximum(tl.minimum(max_depth, room), 0)
    num_drafts = tl.where(depth > 0, tl.load(max_drafts_ptr + tree, mask=is_live, other=0), 0)
    flags = tl.load(flags_ptr + slot, mask=is_live, other=0)
    tl.store(limits_ptr + tree * LIMIT_WORDS, num_drafts)
    tl.store(limits_ptr + tree * LIMIT_WORDS + 1, depth)
    tl.store(limits_ptr + tree * LIMIT_WORDS + 2, ((flags & CONSTRAINT) != 0).to(tl.int32))
    node = tl.arange(0, PADDED_NODES)
    row = tree * NUM_NODES + node
    in_tree = node < NUM_NODES
    tl.store(row_slot_ptr + row, tl.where(node == 0, tl.where(is_live, slot, -1), -1), mask=in_tree)
    tl.store(row_token_ptr + row, tl.where(node == 0, token, -1), mask=in_tree)
    tl.store(row_parent_ptr + row, tl.where(node == 0, -1, 0), mask=in_tree)
    tl.store(row_position_ptr + tree * NUM_NODES, num_tokens - 1)
    tl.store(root_slot_ptr + tree, tl.where(is_live, slot, -1))
    tl.store(root_position_ptr + tree, num_tokens - 1)
    position = num_tokens - 1
    table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
    block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=is_live, other=0).to(tl.int64)
    own_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
    draft = tl.arange(0, PADDED_DRAFT_NODES)
    place = first_draft_slot + (tree * NUM_DRAFT_NODES + draft).to(tl.int64)
    kv_slot = tl.where(draft == 0, own_slot, place)
    tl.store(draft_kv_slot_ptr + tree * NUM_DRAFT_NODES + draft, kv_slot, mask=draft < NUM_DRAFT_NODES)


def tree_roots(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    flags: Tensor,
    block_table: Tensor,
    out: RootTensors,
    *,
    max_depth: int,
    block_size: int,
    first_draft_slot: int,
) -> None:
    """Write the roots of the trees of slots [B] (-1: none), and the limits of their growth.

    max_drafts [B]: most drafts of each. flags [S]: a `SlotFlag`. block_table [S, max_blocks]. All int32. A
    slot that has finished gets no root. max_depth: most drafts on a path. first_draft_slot: of the draft's
    cache slots, the first of B * N for its nodes.

    Raises ValueError for another shape or type.
    """
    (num_trees,), (num_rows,) = slots.shape, out.slot.shape
    if num_rows % num_trees or out.draft_kv_slot.shape[0] % num_trees:
        raise ValueError(f"out: {num_rows} rows: expected a multiple of {num_trees}, as of draft_kv_slot")

    check_tensors((num_trees,), torch.int32, slots=slots, max_drafts=max_drafts)
    state.check()
    check_tensor("flags", flags, state.length.shape, torch.int32)
    check_tensor("block_table", block_table, (len(flags), block_table.shape[1]), torch.int32)
    for name in ("slot", "token", "position", "parent"):
        check_tensor(name, getattr(out, name), (num_rows,), torch.int32)
    check_tensors((num_trees,), torch.int32, root_slot=out.root_slot, root_position=out.root_position)
    check_tensor("limits", out.limits, (num_trees, LIMIT_WORDS), torch.int32)
    check_tensor("draft_kv_slot", out.draft_kv_slot, out.draft_kv_slot.shape, torch.int64)
    nodes, draft_nodes = num_rows // num_trees, out.draft_kv_slot.shape[0] // num_trees
    _tree_roots[(num_trees,)](
        slots,
        max_drafts,
        state.length,
        state.last_token,
        state.finish,
        state.max_length,
        flags,
        block_table,
        out.slot,
        out.token,
        out.position,
        out.parent,
        out.root_slot,
        out.root_position,
        out.limits,
        out.draft_kv_slot,
        block_table.shape[1],
        first_draft_slot,
        max_depth,
        NUM_NODES=nodes,
        PADDED_NODES=next_power_of_2(nodes),
        NUM_DRAFT_NODES=draft_nodes,
        PADDED_DRAFT_NODES=next_power_of_2(draft_nodes),
        KV_BLOCK_SIZE=block_size,
        LIMIT_WORDS=LIMIT_WORDS,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
