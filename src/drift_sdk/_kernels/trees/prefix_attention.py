"""Attention of the nodes of trees to the partitions that all of them see whole.

These are the partitions before the one in which the last border of a tile before the root lies. The sums are
those of `_attend` in paged_attention.py, in the same order: see tree_attention.py, which sums the other
partitions.

Grid: (row tiles, KV heads, shares). Program (t, h, s) owns KV head h of the s-th share of the plan's tiles,
for the t-th tile of query rows of each sequence. Row tiles are the fastest dimension, so that the programs of
a share run side by side: the keys come from memory once, and from the L2 cache for the other row tiles.

Bytes: the keys and values of these partitions once, and the partitions' sums.

Dependent launch: the kernel reads the plan, the rows and the block table before it waits, like `_attend`. It
permits its dependents to start at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import (
    TILE_FIRST_KEY,
    TILE_NUM_KEYS,
    TILE_SEQUENCE,
    TILE_SLOT,
    TILE_WORDS,
    next_partition,
    partition_of,
    partition_start,
)
from drift_sdk._kernels.attention.cache_offset import offset_in_cache
from drift_sdk._kernels.attention.online_softmax import LOG2_E, ONES_COLUMNS, attend_tile
from drift_sdk._kernels.attention.paged_attention import AttentionConfig
from drift_sdk._kernels.attention.partition_sums import MIN_DOT_SIZE, AttentionScratch
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["attend_prefix"]

MAX_TILE_ROWS = 64
"""Most query rows of a program: with head_dim 128 the sums take 8,192 fp32, 128 registers of each of the 64
threads of two warps."""


@triton.jit(do_not_specialize=["num_partitions", "max_blocks"])
def _attend_prefix(
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type; heads of a group side by side
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, HEAD_DIM], storage type
    values_ptr,  # as keys
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: no node
    row_position_ptr,  # [R] int32
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores: log2(e) / sqrt(HEAD_DIM)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    NUM_NODES: tl.constexpr,  # of each tree
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row tile, head, share)."""
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    head = tl.program_id(1)
    query_row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = query_row < NUM_QUERY_ROWS
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    key = tl.arange(0, TILE_KEYS)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    share = tl.program_id(2)
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // tl.num_programs(2), num_tiles,
        0, TILE_KEYS, NARROW, NARROW_END, WIDE,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // tl.num_programs(2), num_tiles,
        0, TILE_KEYS, NARROW, NARROW_END, WIDE,
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
        root_position = tl.load(row_position_ptr + sequence * NUM_NODES, cache_modifier=".cg")
        border = root_position // TILE_KEYS * TILE_KEYS
        end_key = partition_start(partition_of(border, NARROW, NARROW_END, WIDE), NARROW, NARROW_END, WIDE)
        num_prefix_tiles = tl.minimum(num_own_tiles, tl.maximum(end_key - sequence_key, 0) // TILE_KEYS)
        row = sequence * NUM_NODES + query_row // GROUP_SIZE
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
        query_mask = is_live[:, None] & is_dim[None, :]
        wait_for_producers(PDL)
        queries = tl.load(
            query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :], mask=query_mask, other=0.0
        )
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = (sequence * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
        for tile in tl.range(0, num_prefix_tiles, num_stages=NUM_STAGES):
            first_key = sequence_key + tile * TILE_KEYS
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, head, dim,
                NUM_KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, TILE_KEYS,
            )  # fmt: skip
            key_mask = (position < end_key)[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0.0)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0.0)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_live[:, None], scale, True
            )
            partition = partition_of(first_key, NARROW, NARROW_END, WIDE)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, WIDE)
            if first_key + TILE_KEYS >= next_start:
                # The partition's last tile: store its sums, and start the next partition.
                sum_index = first_sum + partition * NUM_QUERY_ROWS
                sum_mask = is_row[:, None] & is_dim[None, :]
                sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                tl.store(sum_ptrs, total, mask=sum_mask)
                tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
                tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
                total = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)

        tile_index += num_own_tiles

    wait_for_producers(PDL)  # every CTA waits before it ends, also one without a tile
    start_dependents(PDL)


def attend_prefix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    scratch: AttentionScratch,
    config: AttentionConfig,
    *,
    nodes_per_tree: int,
) -> None:
    """Write the sums of these partitions to `scratch`. `tree_attention` states and checks the arguments."""
    plan = scratch.plan
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = keys.shape[1:3]
    num_query_rows = nodes_per_tree * (num_heads // num_kv_heads)
    tile_rows = min(max(MIN_DOT_SIZE, triton.next_power_of_2(num_query_rows)), MAX_TILE_ROWS)
    num_row_tiles = triton.cdiv(num_query_rows, tile_rows)
    num_shares = max(1, config.num_programs // (num_kv_heads * num_row_tiles))
    _attend_prefix[(num_row_tiles, num_kv_heads, num_shares)](
        query,
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        plan.tiles,
        plan.num_tiles,
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        head_dim**-0.5 * LOG2_E.value,
        plan.max_num_partitions,
        block_table.shape[1],
        NUM_NODES=nodes_per_tree,
        GROUP_SIZE=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_ROWS=tile_rows,
        PADDED_DIM=max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim)),
        KV_BLOCK_SIZE=block_size,
        NUM_STAGES=config.num_stages,
        TILE_KEYS=plan.partitions.tile,
        NARROW=plan.partitions.narrow,
        NARROW_END=plan.partitions.narrow_end,
        WIDE=plan.partitions.wide,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )
