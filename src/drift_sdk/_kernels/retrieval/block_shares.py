"""The share of attention that blocks of keys get from the rows of a round, by which blocks are retrieved.

    score[r, h, p] = query[r, h] . key[p] * scale                      for positions p <= position[r]
    share[n] = sum over rows r, heads h of sum over p in block n of softmax(score[r, h])[p]

Two kernels. `_sum_blocks` sums each block by itself: log2 of the sum of exp2(score). `_add_shares` divides by
the sums of all blocks, those that are always read included, so that a head that attends to these alone counts
little.

Grid of `_sum_blocks`: (KV heads, sequences, splits). Program (h, s, i) takes every n-th tile of keys of the
sequence, for all its rows and all query heads of the group. Bytes: the keys, once for all rows and heads of a
group. Grid of `_add_shares`: (KV heads, sequences). Bytes: the sums, twice.

The order of sums over blocks is that of tiles; no bit of a token depends on it, only which blocks are read.

Dependent launch: both wait for their producers before their first read. `_add_shares` lets its dependents
start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import padded_size
from drift_sdk._kernels.attention.softmax import LOG2_E
from drift_sdk._kernels.common.arguments import check_power_of_two, check_tensor, check_tensors
from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk.partial_verification import MAX_VIEW_BLOCK_SIZE

__all__ = ["TILE_KEYS", "block_shares"]

TILE_KEYS = MAX_VIEW_BLOCK_SIZE
"""Keys of a tile: the most tokens of a block."""
TILE_BLOCKS = 64
"""Blocks that `_add_shares` takes at once."""
PROGRAMS_PER_MULTIPROCESSOR = 4


@kernel(do_not_specialize=["max_blocks"])
def _sum_blocks(
    query_ptr,  # [B * QUERY_ROWS, num_heads, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], storage type
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [B * ROWS] int32; -1: padding row
    row_position_ptr,  # [B * ROWS] int32
    sums_ptr,  # [B, NUM_KV_HEADS, max_blocks, ROWS * GROUP_SIZE] fp32, written: log2 of sums
    scale,  # of scores, times log2(e)
    max_blocks,
    QUERY_ROWS: tl.constexpr,  # of a sequence: the last ROWS of them are scored
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # ROWS * GROUP_SIZE as a power of two, 16 or more
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, sequence, split). A third of its lines are arguments."""
    wait_for_producers(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = TILE_KEYS // BLOCK_SIZE
    query_row = tl.arange(0, TILE_ROWS)
    is_row = query_row < ROWS * GROUP_SIZE
    row = sequence * ROWS + query_row // GROUP_SIZE
    slot = tl.load(row_slot_ptr + sequence * ROWS)
    is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1) >= 0
    last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1)
    num_keys = tl.max(last_position, 0) + 1
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    source = sequence * QUERY_ROWS + QUERY_ROWS - ROWS + query_row // GROUP_SIZE
    query_index = (source * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
    query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
    queries = tl.load(query_ptrs, mask=is_live[:, None] & is_dim[None, :], other=0.0)
    key = tl.arange(0, TILE_KEYS)
    block = tl.arange(0, BLOCKS)
    table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
    own_sums_ptr = sums_ptr + (sequence * NUM_KV_HEADS + head).to(tl.int64) * max_blocks * (ROWS * GROUP_SIZE)
    num_tiles = (num_keys + TILE_KEYS - 1) // TILE_KEYS
    for tile in range(tl.program_id(2), num_tiles, tl.num_programs(2)):
        position = tile * TILE_KEYS + key
        is_key = position < num_keys
        place = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        cache_row = (place * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        key_ptrs = keys_ptr + cache_row[:, None] * HEAD_DIM + dim[None, :]
        keys = tl.load(key_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        score = tl.dot(queries, keys.T, input_precision="ieee") * scale
        score = tl.where(position[None, :] <= last_position[:, None], score, float("-inf"))
        by_block = tl.reshape(score, (TILE_ROWS, BLOCKS, BLOCK_SIZE))
        maximum = tl.max(by_block, 2)
        reference = tl.where(maximum == float("-inf"), 0.0, maximum)
        total = tl.sum(tl.exp2(by_block - reference[:, :, None]), 2)
        is_empty = total == 0.0
        sums = reference + tl.log2(tl.where(is_empty, 1.0, total))
        index = tile * BLOCKS + block
        sum_ptrs = own_sums_ptr + index[None, :] * (ROWS * GROUP_SIZE) + query_row[:, None]
        is_sum = is_row[:, None] & (index * BLOCK_SIZE < num_keys)[None, :]
        tl.store(sum_ptrs, tl.where(is_empty, float("-inf"), sums), mask=is_sum)


@kernel(do_not_specialize=["max_blocks"])
def _add_shares(
    sums_ptr,  # [B, NUM_KV_HEADS, max_blocks, ROWS * GROUP_SIZE] fp32
    row_slot_ptr,  # [B * ROWS] int32
    row_position_ptr,  # [B * ROWS] int32
    shares_ptr,  # [B, NUM_KV_HEADS, max_blocks] fp32, written as far as there are keys
    max_blocks,
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, sequence)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1)
    query_row = tl.arange(0, TILE_ROWS)
    row = sequence * ROWS + query_row // GROUP_SIZE
    is_row = query_row < ROWS * GROUP_SIZE
    is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1) >= 0
    last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1)
    num_blocks = (tl.max(last_position, 0) + BLOCK_SIZE) // BLOCK_SIZE
    own = (sequence * NUM_KV_HEADS + head).to(tl.int64) * max_blocks
    block = tl.arange(0, TILE_BLOCKS)
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    for first in range(0, num_blocks, TILE_BLOCKS):
        index = first + block
        sum_ptrs = sums_ptr + (own + index)[None, :] * (ROWS * GROUP_SIZE) + query_row[:, None]
        is_sum = is_live[:, None] & (index < num_blocks)[None, :]
        sums = tl.load(sum_ptrs, mask=is_sum, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(sums, 1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp2(maximum - reference) + tl.sum(tl.exp2(sums - reference[:, None]), 1)
        maximum = new_maximum

    whole = tl.where(is_live, maximum + tl.log2(tl.where(is_live, total, 1.0)), 0.0)
    for first in range(0, num_blocks, TILE_BLOCKS):
        index = first + block
        sum_ptrs = sums_ptr + (own + index)[None, :] * (ROWS * GROUP_SIZE) + query_row[:, None]
        is_sum = is_live[:, None] & (index < num_blocks)[None, :]
        sums = tl.load(sum_ptrs, mask=is_sum, other=float("-inf"))
        share = tl.sum(tl.exp2(sums - whole[:, None]), 0)
        tl.store(shares_ptr + own + index, share, mask=index < num_blocks)


def block_shares(
    query: Tensor,
    keys: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    sums: Tensor,
    shares: Tensor,
    *,
    num_sequences: int,
    scale: float | None = None,
) -> None:
    """Write the shares of attention that the rows [B * T] of B sequences give each of their blocks.

    query [B * T', num_heads, head_dim], storage type: those of the last T of T' rows are taken. keys
    [num_blocks, num_kv_heads, block_size, head_dim], storage type, blocks of at most TILE_KEYS tokens.
    block_table [S, max_blocks] int32. row_slot, row_position [B * T] int32: slots (-1: a padding row, which
    sees nothing) and last positions that rows see. sums [B, num_kv_heads, max_blocks, T * group] fp32,
    written. shares [B, num_kv_heads, max_blocks] fp32, written for blocks with keys that some row sees.
    scale: of scores; None: 1 / sqrt(head_dim).
    All contiguous. Raises ValueError for another shape, type or layout.

    Long for the arguments of two kernels.
    """
    (num_rows,), (_, num_heads, head_dim) = row_slot.shape, query.shape
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    max_blocks, group, rows = block_table.shape[1], num_heads // num_kv_heads, num_rows // num_sequences
    check_power_of_two("block_size", block_size)
    if block_size > TILE_KEYS:
        raise ValueError(f"block_size: {block_size}: expected at most {TILE_KEYS}")

    check_tensor("query", query, query.shape, query.dtype)
    check_tensor("keys", keys, (num_blocks, num_kv_heads, block_size, head_dim), query.dtype)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    check_tensors((num_sequences * rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("sums", sums, (num_sequences, num_kv_heads, max_blocks, rows * group), torch.float32)
    check_tensor("shares", shares, (num_sequences, num_kv_heads, max_blocks), torch.float32)
    tile_rows = padded_size(rows * group)
    num_heads_all = num_kv_heads * num_sequences
    num_splits = PROGRAMS_PER_MULTIPROCESSOR * gpu_limits().num_multiprocessors // num_heads_all
    most_splits = -(-max_blocks * block_size // TILE_KEYS)
    _sum_blocks[(num_kv_heads, num_sequences, max(1, min(num_splits, most_splits)))](
        query,
        keys,
        block_table,
        row_slot,
        row_position,
        sums,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E.value,
        max_blocks,
        QUERY_ROWS=query.shape[0] // num_sequences,
        ROWS=rows,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_size(head_dim),
        TILE_ROWS=tile_rows,
        BLOCK_SIZE=block_size,
        TILE_KEYS=TILE_KEYS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
    _add_shares[(num_kv_heads, num_sequences)](
        sums,
        row_slot,
        row_position,
        shares,
        max_blocks,
        ROWS=rows,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        TILE_ROWS=tile_rows,
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=TILE_BLOCKS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
