"""Attention of the nodes of trees to the partitions that all of them see whole.

These are the partitions before the one in which the last border of a tile before the root lies. The sums are
those of `_attend` in paged_attention.py, in the same order: see tree_attention.py, whose kernel this is a
part of.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.attention.attention_plan import (
    TILE_FIRST_KEY,
    TILE_NUM_KEYS,
    TILE_SEQUENCE,
    TILE_SLOT,
    TILE_WORDS,
    next_partition,
)
from drift_sdk._kernels.attention.cache_offset import offset_in_cache
from drift_sdk._kernels.attention.online_softmax import (
    ONES_COLUMNS,
    attend_tile,
    head_scale,
    load_parts,
    store_parts,
    zero_parts,
)
from drift_sdk._kernels.attention.partitions import partition_of, partition_start
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.launching import wait_for_producers

__all__ = ["attend_prefix"]


@device_function
def attend_prefix(
    row_tile,
    head,
    share,
    num_shares,
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type; heads of a group side by side
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: no node
    row_position_ptr,  # [R] int32
    root_position_ptr,  # [num_sequences * ROOT_STRIDE] int32
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    NUM_NODES: tl.constexpr,  # query rows of each tree, before heads
    ROOT_STRIDE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
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
    """Write the sums of one KV head of a share of the plan's tiles, for a tile of query rows of each
    sequence. Plan, rows and block table are read before the kernels before this one have ended. Longer than
    other kernels: one loop over sums that stay in registers."""
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    query_row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = query_row < NUM_QUERY_ROWS
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < PART_DIM
    scale = head_scale(scale, key_scale_ptr, head)
    key = tl.arange(0, TILE_KEYS)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // num_shares, num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // num_shares, num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    while tile_index < end_index:
        # The share's tiles of one sequence.
        tile_ptr = tiles_ptr + tile_index * TILE_WORDS
        sequence = tl.load(tile_ptr + TILE_SEQUENCE, cache_modifier=".cg")
        slot = tl.load(tile_ptr + TILE_SLOT, cache_modifier=".cg")
        num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, cache_modifier=".cg")
        sequence_key = tl.load(tile_ptr + TILE_FIRST_KEY, cache_modifier=".cg")
        num_own_tiles = tl.minimum(
            end_index - tile_index, (num_keys - sequence_key + TILE_KEYS - 1) // TILE_KEYS
        )
        root_position = tl.load(root_position_ptr + sequence * ROOT_STRIDE, cache_modifier=".cg")
        border = root_position // TILE_KEYS * TILE_KEYS
        end_key = partition_start(
            partition_of(border, NARROW, NARROW_END, NUM_DOUBLINGS), NARROW, NARROW_END, NUM_DOUBLINGS
        )
        num_prefix_tiles = tl.minimum(num_own_tiles, tl.maximum(end_key - sequence_key, 0) // TILE_KEYS)
        row = sequence * NUM_NODES + query_row // GROUP_SIZE
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        first_seen = FIRST_KEY
        if WINDOW > 0:
            # Keys that no row sees are not loaded: they may hold anything.
            last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1, cache_modifier=".cg")
            first_seen = tl.maximum(root_position - (WINDOW - 1), FIRST_KEY)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
        query_mask = is_live[:, None] & is_dim[None, :]
        wait_for_producers(PDL)
        query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
        queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, "")
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = (sequence * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:  # the first place is that of the first partition that a row sees
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS) * NUM_QUERY_ROWS
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for tile in tl.range(0, num_prefix_tiles, num_stages=NUM_STAGES):
            first_key = sequence_key + tile * TILE_KEYS
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, "",
            )  # fmt: skip
            is_key = position < end_key
            if FIRST_KEY > 0 or WINDOW > 0:
                is_key = is_key & (position >= first_seen)
            key_mask = is_key[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0)
            is_seen = is_live[:, None] & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > last_position[:, None] - WINDOW)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
            partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
            if first_key + TILE_KEYS >= next_start:
                # The partition's last tile: store its sums, and start the next partition.
                sum_index = first_sum + partition * NUM_QUERY_ROWS
                sum_mask = is_row[:, None] & is_dim[None, :]
                sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                store_parts(sum_ptrs, total, sum_mask, PART_DIM, NUM_PARTS)
                tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
                tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
                total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)

        tile_index += num_own_tiles
