"""The rows of trees of drafts: ancestors as bits, positions, paths, and where keys and values are stored.

A tree has T rows, its nodes; row 0 is the root, the sequence's newest token. A parent has a lower number than
its children. The first path leads from the root by the lowest child of each node.

    position[n]  = position[root] + depth[n]
    bits[n]      = sum of 2**a over n and its ancestors a
    path[n, d]   = the ancestor of n at depth d, n itself at its own depth; -1 behind it
    kv_slot[n]   = the cache slot of position[n] in the sequence's blocks for the first path, else
                   first_tree_slot + b * T + n for tree b of the step

So keys and values of a chain lie at their places from the start, and the other nodes of a tree take no blocks
of the sequence.

Grid: one program a tree, which owns its T rows. Parents are followed by loads, at most MAX_PATH times. Bytes:
8 a row in, and again 4 for each step up, from L1; 12 + 4 * (MAX_PATH + 1) a row out. Integers only.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_range, check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk.trees.limits import MAX_PATH_LENGTH, MAX_TREE_NODES

__all__ = ["PATH_ENTRIES", "TreeRowTensors", "tree_rows"]

PATH_ENTRIES = MAX_PATH_LENGTH + 1
"""Nodes of the longest path, the root included."""
NO_NODE = tl.constexpr(2**31 - 1)
"""Larger than the number of any node."""

TreeRowTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Position, ancestor bits, KV slot and path of each row."""


@kernel
def _tree_rows(
    row_slot_ptr,  # [R] int32; -1: no node
    row_parent_ptr,  # [R] int32: number of the parent in its tree; -1: the root
    length_ptr,  # [S] int32: tokens of each slot
    block_table_ptr,  # [S, max_blocks] int32
    row_position_ptr,  # [R] int32, written
    row_bits_ptr,  # [R] int64, written
    row_kv_slot_ptr,  # [R] int64, written
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32, written
    max_blocks,
    first_tree_slot,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_NODES: tl.constexpr,  # T
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    node = tl.arange(0, PADDED_NODES)
    in_tree = node < NUM_NODES
    row = tree * NUM_NODES + node
    slot = tl.load(row_slot_ptr + tree * NUM_NODES)
    if slot >= 0:
        is_node = tl.load(row_slot_ptr + row, mask=in_tree, other=-1) >= 0
        parent = tl.load(row_parent_ptr + row, mask=is_node, other=-2)
        bits = tl.zeros((PADDED_NODES,), tl.int64)
        depth = tl.zeros((PADDED_NODES,), tl.int32) - 1
        ancestor = tl.where(is_node, node, -1)
        for _ in tl.static_range(NUM_PATH_ENTRIES):
            is_ancestor = ancestor >= 0
            depth += is_ancestor.to(tl.int32)
            shift = tl.where(is_ancestor, ancestor, 0).to(tl.int64)
            bits |= is_ancestor.to(tl.int64) << shift
            ancestor = tl.load(row_parent_ptr + tree * NUM_NODES + ancestor, mask=is_ancestor, other=-1)

        ancestor = tl.where(is_node, node, -1)
        first = tl.full((), 0, tl.int32)
        on_first_path = node == 0
        for step in tl.static_range(NUM_PATH_ENTRIES):
            is_ancestor = ancestor >= 0
            path_ptrs = row_path_ptr + row * NUM_PATH_ENTRIES
            tl.store(path_ptrs + depth - step, ancestor, mask=is_ancestor)
            # Entries behind the node's own.
            tl.store(path_ptrs + depth + 1 + step, -1, mask=in_tree & (depth + 1 + step < NUM_PATH_ENTRIES))
            ancestor = tl.load(row_parent_ptr + tree * NUM_NODES + ancestor, mask=is_ancestor, other=-1)
            first = tl.min(tl.where(parent == first, node, NO_NODE), 0)
            on_first_path |= node == first

        position = tl.load(length_ptr + slot) - 1 + depth
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        on_first_path &= is_node
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=on_first_path, other=0).to(tl.int64)
        own_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        tree_slot = first_tree_slot + row.to(tl.int64)
        tl.store(row_position_ptr + row, position, mask=is_node)
        tl.store(row_bits_ptr + row, bits, mask=in_tree)
        tl.store(row_kv_slot_ptr + row, tl.where(on_first_path, own_slot, tree_slot), mask=is_node)


def tree_rows(
    row_slot: Tensor,
    row_parent: Tensor,
    length: Tensor,
    block_table: Tensor,
    out: TreeRowTensors,
    *,
    nodes_per_tree: int,
    block_size: int,
    first_tree_slot: int,
) -> None:
    """Write positions, ancestor bits, KV slots and paths of the nodes of B trees with T rows each.

    row_slot, row_parent [B * T] int32: the slot of each node (-1: no node; a tree without a root is padding),
    and the number of its parent in the tree, lower than its own; -1 for the root. length [S] int32: tokens of
    each slot. block_table [S, max_blocks] int32.
    out: position [B * T] int32, bits [B * T] int64, kv_slot [B * T] int64 and path [B * T, PATH_ENTRIES]
    int32. Rows without a node get bits of 0 and paths of -1, and nothing else; those of padding get nothing.
    nodes_per_tree: T, at most MAX_TREE_NODES. first_tree_slot: of the cache's slots, the first of B * T for
    nodes that are not on a first path.

    Raises ValueError for another shape or type. A path of more than PATH_ENTRIES nodes is cut.
    """
    (num_rows,) = row_slot.shape
    check_range("nodes_per_tree", nodes_per_tree, 1, MAX_TREE_NODES)
    if num_rows % nodes_per_tree:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {nodes_per_tree}")

    position, bits, kv_slot, path = out
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_parent=row_parent, position=position)
    check_tensors((num_rows,), torch.int64, bits=bits, kv_slot=kv_slot)
    check_tensor("path", path, (num_rows, PATH_ENTRIES), torch.int32)
    check_tensor("length", length, length.shape, torch.int32)
    check_tensor("block_table", block_table, (length.shape[0], block_table.shape[1]), torch.int32)
    _tree_rows[(num_rows // nodes_per_tree,)](
        row_slot,
        row_parent,
        length,
        block_table,
        *out,
        block_table.shape[1],
        first_tree_slot,
        KV_BLOCK_SIZE=block_size,
        NUM_NODES=nodes_per_tree,
        PADDED_NODES=next_power_of_2(nodes_per_tree),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(),
        num_warps=2,
        **launch_options(),
    )
