"""Places of a tile of keys or values in a paged cache."""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function

__all__ = ["offset_in_cache"]


@device_function
def offset_in_cache(
    table_ptr,  # [max_blocks] int32: the block table's row of a slot
    first_key,  # position of the tile's first key
    key,  # [TILE_KEYS]: 0 ... TILE_KEYS - 1
    position,  # [TILE_KEYS]: first_key + key
    num_keys,
    head,  # KV head
    dim,  # [PADDED_DIM]
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CACHE: tl.constexpr,  # the cache_modifier of loads from the table
):
    """Return the offsets [TILE_KEYS, PADDED_DIM] of a tile's keys (or values) in the cache."""
    if KV_BLOCK_SIZE >= TILE_KEYS:  # a tile lies in one block, and is contiguous in it
        block = tl.load(table_ptr + first_key // KV_BLOCK_SIZE, cache_modifier=CACHE).to(tl.int64)
        return ((block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + first_key % KV_BLOCK_SIZE) * HEAD_DIM + (
            key[:, None] * HEAD_DIM + dim[None, :]
        )
    else:
        block_ptrs = table_ptr + position // KV_BLOCK_SIZE
        block = tl.load(block_ptrs, mask=position < num_keys, other=0, cache_modifier=CACHE).to(tl.int64)
        cache_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        return cache_row[:, None] * HEAD_DIM + dim[None, :]
