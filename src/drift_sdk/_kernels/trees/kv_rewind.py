"""The keys and values of accepted nodes, moved to their positions in all layers.

    cache[slot of position[root] + d] = cache[kv_slot[path[d]]]   for the nodes path[d] of each accepted path

Rows of rejected nodes are left as they are: no later row reads them before they are overwritten. A node whose
row lies at its position already is not moved, so nothing is moved for a chain.

Grid: (trees, layers times KV heads). A program owns the rows of one tree in one head of one layer. It reads
all of them before it writes any, so sources and targets of a tree may overlap; those of different trees may
not. Bytes: keys and values of the moved rows, read and written once.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.e4m3 import cache_words
from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["kv_rewind"]


@kernel
def _kv_rewind(
    keys_ptr,  # [L, num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, HEAD_DIM], of any type, read and written
    values_ptr,  # as keys
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_kv_slot_ptr,  # [R] int64
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32
    layer_stride,  # elements from a layer of the cache to the next
    max_blocks,
    NUM_NODES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, L * NUM_KV_HEADS)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    layer, head = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    if slot >= 0:
        entry = tl.arange(0, PADDED_ENTRIES)
        in_path = entry < NUM_PATH_ENTRIES
        node = tl.load(path_ptr + tree * NUM_PATH_ENTRIES + entry, mask=in_path, other=-1)
        is_kept = node >= 0
        source = tl.load(row_kv_slot_ptr + first_row + node, mask=is_kept, other=0)
        position = tl.load(row_position_ptr + first_row) + entry
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=is_kept, other=0).to(tl.int64)
        target = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        is_moved = is_kept & (source != target)
        dim = tl.arange(0, PADDED_DIM)
        mask = is_moved[:, None] & (dim < HEAD_DIM)[None, :]
        first_offset = layer.to(tl.int64) * layer_stride + dim[None, :]
        from_row = (source // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + source % KV_BLOCK_SIZE
        to_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        from_offset = first_offset + from_row[:, None] * HEAD_DIM
        to_offset = first_offset + to_row[:, None] * HEAD_DIM
        keys = tl.load(keys_ptr + from_offset, mask=mask, other=0)
        values = tl.load(values_ptr + from_offset, mask=mask, other=0)
        tl.debug_barrier()  # no thread writes before all have read
        tl.store(keys_ptr + to_offset, keys, mask=mask)
        tl.store(values_ptr + to_offset, values, mask=mask)


def kv_rewind(
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_kv_slot: Tensor,
    path: Tensor,
    *,
    nodes_per_tree: int,
) -> None:
    """Move the keys and values of accepted nodes to their positions.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], of any type. block_table [S,
    max_blocks] int32. row_slot, row_position [B * T] int32 and row_kv_slot [B * T] int64: as of `tree_rows`.
    path [B, PATH_ENTRIES] int32: as of `tree_accept`. All contiguous.

    Raises ValueError for another shape, type or layout.
    """
    keys, values = cache_words(keys), cache_words(values)
    num_layers, _, num_kv_heads, block_size, head_dim = keys.shape
    num_trees, num_rows = path.shape[0], path.shape[0] * nodes_per_tree
    check_tensors(keys.shape, keys.dtype, keys=keys, values=values)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("row_kv_slot", row_kv_slot, (num_rows,), torch.int64)
    check_tensor("path", path, (num_trees, PATH_ENTRIES), torch.int32)
    _kv_rewind[(num_trees, num_layers * num_kv_heads)](
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        row_kv_slot,
        path,
        keys.stride(0),
        block_table.shape[1],
        NUM_NODES=nodes_per_tree,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_2(head_dim),
        KV_BLOCK_SIZE=block_size,
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PADDED_ENTRIES=next_power_of_2(PATH_ENTRIES),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
