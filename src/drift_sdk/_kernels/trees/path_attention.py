"""Attention of the nodes of trees to the keys from the partition of the border on; see tree_attention.py.

The border is the last border of a tile before the root. The partition's tiles before it are the same for all
nodes. Those behind it hold, for each node, the keys that it sees there in a chain: the end of the prefix, and
its ancestors in the order of their depth, gathered through the list of its path.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.attention.cache_offset import offset_in_cache
from drift_sdk._kernels.attention.online_softmax import (
    ONES_COLUMNS,
    attend_tile,
    clear_parts,
    head_scale,
    load_parts,
    store_parts,
    zero_parts,
)
from drift_sdk._kernels.attention.partitions import partition_of, partition_start
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.launching import wait_for_producers

__all__ = ["attend_paths"]


@device_function
def path_slots(
    slot,  # -1: no node
    row,  # of the step
    tree,
    first_key,  # position of the tile's first key
    key,  # [TILE_KEYS]: 0 ... TILE_KEYS - 1
    root_position,
    first_seen,  # position
    table_ptr,  # [max_blocks] int32: the block table's row of the slot
    node_kv_slot_ptr,  # [B * NUM_TREE_NODES] int64
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    NUM_TREE_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
):
    """Return the cache slots [TILE_KEYS] of the keys that a node sees in a tile behind the border, as in a
    chain: the prefix, then its ancestors. -1: no key. Paths of rows without a node may hold anything."""
    position = first_key + key
    is_node = slot + key * 0 >= 0
    is_prefix = is_node & (position < root_position) & (position >= first_seen)
    block_ptrs = table_ptr + position // KV_BLOCK_SIZE
    block = tl.load(block_ptrs, mask=is_prefix, other=0, cache_modifier=".cg").to(tl.int64)
    depth = position - root_position
    on_path = is_node & (depth >= 0) & (depth < NUM_PATH_ENTRIES)
    ancestor_ptrs = row_path_ptr + row * NUM_PATH_ENTRIES + depth
    ancestor = tl.load(ancestor_ptrs, mask=on_path, other=-1, cache_modifier=".cg")
    node_ptrs = node_kv_slot_ptr + tree * NUM_TREE_NODES + ancestor
    tree_slot = tl.load(node_ptrs, mask=ancestor >= 0, other=-1, cache_modifier=".cg")
    return tl.where(is_prefix, block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE, tree_slot)


@device_function
def attend_paths(
    first_node,
    head,
    tree,
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: no node
    row_position_ptr,  # [R] int32
    root_position_ptr,  # [B * ROOT_STRIDE] int32
    node_kv_slot_ptr,  # [B * NUM_TREE_NODES] int64
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,
    max_blocks,
    NUM_NODES: tl.constexpr,  # query rows of each tree, before heads
    NUM_TREE_NODES: tl.constexpr,  # nodes that paths consist of
    ROOT_STRIDE: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    NUM_PATH_TILES: tl.constexpr,  # tiles that a path may reach, from the border on
    TILE_NODES: tl.constexpr,  # nodes of the program
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # TILE_NODES * GROUP_SIZE, rounded up to a power of two, 16 or more
    NUM_PARTS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the sums of one KV head of a tree's nodes first_node ... first_node + TILE_NODES - 1. Rows, block
    table and paths are read before the kernels before this one have ended. Longer than other kernels by its
    arguments."""
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    scale = head_scale(scale, key_scale_ptr, head)
    tile_row = tl.arange(0, TILE_ROWS)
    member = tile_row // GROUP_SIZE
    node = first_node + member
    is_row = (member < TILE_NODES) & (node < NUM_NODES)
    row = tree * NUM_NODES + node
    slots = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg")
    is_row = slots >= 0
    own_position = tl.load(row_position_ptr + row, mask=is_row, other=-1, cache_modifier=".cg")
    root_position = tl.load(root_position_ptr + tree * ROOT_STRIDE, cache_modifier=".cg")
    slot = tl.max(slots, 0)
    key = tl.arange(0, TILE_KEYS)
    first_seen = FIRST_KEY
    if WINDOW > 0:  # as in `_attend`, for all rows of the tree
        first_seen = tl.maximum(root_position - (WINDOW - 1), FIRST_KEY)
    border = root_position // TILE_KEYS * TILE_KEYS
    table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
    own_slots = ()  # of one node: known before the first key has come
    if TILE_NODES == 1:
        for tile in tl.static_range(NUM_PATH_TILES):
            found = path_slots(
                slot, tree * NUM_NODES + first_node, tree, border + tile * TILE_KEYS, key,
                root_position, first_seen, table_ptr, node_kv_slot_ptr, row_path_ptr, NUM_TREE_NODES,
                NUM_PATH_ENTRIES, KV_BLOCK_SIZE,
            )  # fmt: skip
            own_slots = own_slots + (found,)  # type: ignore[assignment]  # a longer tuple
    wait_for_producers(PDL)
    if slot >= 0:
        dim = tl.arange(0, PADDED_DIM)
        is_dim = dim < PART_DIM
        border_partition = partition_of(border, NARROW, NARROW_END, NUM_DOUBLINGS)
        begin_key = partition_start(border_partition, NARROW, NARROW_END, NUM_DOUBLINGS)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + tile_row % GROUP_SIZE
        query_mask = is_row[:, None] & is_dim[None, :]
        query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
        queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, "")
        query_row = node * GROUP_SIZE + tile_row % GROUP_SIZE
        first_sum = (tree * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS) * NUM_QUERY_ROWS
            begin_key = tl.maximum(begin_key, first_seen // TILE_KEYS * TILE_KEYS)
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for first_key in tl.range(begin_key, border, TILE_KEYS, num_stages=NUM_STAGES):
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, border, head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, "",
            )  # fmt: skip
            key_mask = (position >= first_seen)[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0)
            is_seen = is_row[:, None] & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > own_position[:, None] - WINDOW)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )

        partition = tile_row * 0 + border_partition
        for index in tl.range(0, TILE_NODES, num_stages=1):
            is_own = is_row & (member == index)
            last_key = tl.max(tl.where(is_own, own_position, -1), 0)  # -1: no node
            for tile in tl.static_range(NUM_PATH_TILES):
                first_key = border + tile * TILE_KEYS
                if first_key <= last_key:
                    if tile > 0:
                        tile_partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
                        stored = is_own & (partition != tile_partition)
                        # The tile before was its partition's last: store the sums, start the next partition.
                        sum_index = first_sum + partition * NUM_QUERY_ROWS
                        sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                        sum_mask = stored[:, None] & is_dim[None, :]
                        store_parts(sum_ptrs, total, sum_mask, PART_DIM, NUM_PARTS)
                        tl.store(maxima_ptr + sum_index, maximum, mask=stored)
                        tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=stored)
                        maximum = tl.where(stored, float("-inf"), maximum)
                        weight = tl.where(stored[:, None], 0.0, weight)
                        total = clear_parts(total, stored, NUM_PARTS)
                        partition = tl.where(stored, tile_partition, partition)

                    if TILE_NODES > 1:
                        kv_slot = path_slots(
                            slot, tree * NUM_NODES + first_node + index, tree, first_key, key,
                            root_position, first_seen, table_ptr, node_kv_slot_ptr, row_path_ptr,
                            NUM_TREE_NODES, NUM_PATH_ENTRIES, KV_BLOCK_SIZE,
                        )  # fmt: skip
                    else:
                        kv_slot = own_slots[tile]
                    is_key = kv_slot >= 0
                    cache_row = (kv_slot // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE
                    cache_offset = (cache_row + kv_slot % KV_BLOCK_SIZE)[:, None] * PART_DIM + dim[None, :]
                    key_mask = is_key[:, None] & is_dim[None, :]
                    keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0)
                    values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0)
                    is_seen = is_own[:, None] & is_key[None, :]
                    if WINDOW > 0:
                        position = first_key + key
                        is_seen = is_seen & (position[None, :] > own_position[:, None] - WINDOW)
                    maximum, weight, total = attend_tile(
                        maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
                    )

        sum_index = first_sum + partition * NUM_QUERY_ROWS
        sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        store_parts(sum_ptrs, total, query_mask, PART_DIM, NUM_PARTS)
        tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
        tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
