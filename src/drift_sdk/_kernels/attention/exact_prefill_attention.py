"""Causal attention of prompt chunks over a paged cache, with the bits of decoding.

    output[r, h] = softmax over p <= position[r] of (query[r, h] . key[p] * scale) . value[p]

With a window w, a row sees only the last w of these positions. A sink is one more score in the softmax, whose
value is zero.

Order of summation: that of online_softmax.py, as `paged_attention` sums. A prompt's rows get the bits that
they have when they are decoded or verified, however the prompt is cut into chunks. `prefill_attention` is
faster (it does not keep the sums of partitions apart) and has other bits.

Grid: (heads, tiles of rows). Program (h, t) owns query head h of the rows of tile t, at most TILE_ROWS rows
of one chunk. Heads run first, so that programs which share keys run together.

Flops: 4 * num_heads * head_dim for each pair of a row and a key it sees, and an eighth of that for the
denominator, which is a product with 16 columns of ones. Bytes: as `prefill_attention`.

Dependent launch: a program waits before it reads anything, and permits its dependents to start when only the
store of its rows is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import Partitions, partition_of, partition_start
from drift_sdk._kernels.attention.e4m3 import (
    cache_words,
    check_cache,
    check_scales,
    is_decoded_in_pairs,
)
from drift_sdk._kernels.attention.online_softmax import (
    LOG2_E,
    ONES_COLUMNS,
    add_partition,
    add_sink,
    attend_tile,
    head_scale,
    load_parts,
    zero_parts,
)
from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS
from drift_sdk._kernels.common.arguments import check_range, check_tensor, check_tensors
from drift_sdk._kernels.common.gpu_limits import gpu_limits
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk.quantised.e4m3 import E4M3

__all__ = ["ExactPrefillConfig", "exact_prefill_attention", "exact_prefill_config"]

NUM_FIELDS = tl.constexpr(TILE_FIELDS)
MIN_DOT_SIZE = 16
"""The least rows and columns of a tile in a product: those of an MMA."""


WIDE_SHARED_BYTES = 107_000
"""Shared memory that 64 rows of heads of 256 dimensions take, rounded up; compute capability 8.6 has less."""


class ExactPrefillConfig(Struct, frozen=True):
    """Launch configuration of the kernel; none of it is part of the result's bits.

    tile_rows: rows of a program, a power of two, 16 or more.
    num_stages: of the pipeline over a partition's tiles. Keys are found through the block table, so stages
    serve two loads one after the other: five of them keep three tiles in shared memory.
    narrow_stages: of the pipeline over narrow partitions, each of which is loaded whole.
    """

    tile_rows: int = 128
    num_warps: int = 8
    num_stages: int = 5
    narrow_stages: int = 3


FEW_ROWS = 192
"""Most rows of a step for which tiles are halved: wide ones would leave multiprocessors without a program."""


def exact_prefill_config(
    head_dim: int, dtype: torch.dtype, num_rows: int | None = None
) -> ExactPrefillConfig:
    """Return the config for heads of this size: what fits in registers and shared memory without spilling.

    num_rows: of all chunks of a step; None: many.
    """
    if dtype == torch.float32:
        return ExactPrefillConfig(tile_rows=16, num_stages=1, narrow_stages=1)

    if head_dim > 128 and gpu_limits().shared_bytes < WIDE_SHARED_BYTES:
        return ExactPrefillConfig(tile_rows=32, num_warps=4, num_stages=3, narrow_stages=1)

    if head_dim > 128:
        return ExactPrefillConfig(tile_rows=64, num_stages=3, narrow_stages=1)

    if num_rows is not None and num_rows <= FEW_ROWS:
        return ExactPrefillConfig(tile_rows=64, num_warps=4)

    return ExactPrefillConfig()


@triton.jit
def _load_tile(
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    table_ptr,  # [max_blocks] int32: the block table's row of a slot
    first_key,  # position of the tile's first key, a multiple of TILE_KEYS
    num_keys,  # keys from this position on may never have been written
    head,  # KV head
    NUM_KV_HEADS: tl.constexpr,
    PART_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether keys of the tile may lie beyond num_keys
):
    """Return a tile of keys and of values [TILE_KEYS, PADDED_DIM] as in the cache, zeros without a key."""
    dim = tl.arange(0, PADDED_DIM)
    position = first_key + tl.arange(0, TILE_KEYS)
    if BLOCK_SIZE >= TILE_KEYS:
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        tile_offset = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + first_key % BLOCK_SIZE) * PART_DIM
        row_offset = tl.arange(0, TILE_KEYS) * PART_DIM
    else:
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < num_keys, other=0).to(tl.int64)
        tile_offset = 0
        row_offset = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * PART_DIM
    cache_offset = tile_offset + (row_offset[:, None] + dim[None, :])
    if IS_MASKED:
        mask = (position < num_keys)[:, None] & (dim < PART_DIM)[None, :]
        keys = tl.load(keys_ptr + cache_offset, mask=mask, other=0)
        values = tl.load(values_ptr + cache_offset, mask=mask, other=0)
    elif PART_DIM < PADDED_DIM:
        keys = tl.load(keys_ptr + cache_offset, mask=(dim < PART_DIM)[None, :], other=0)
        values = tl.load(values_ptr + cache_offset, mask=(dim < PART_DIM)[None, :], other=0)
    else:
        keys = tl.load(keys_ptr + cache_offset)
        values = tl.load(values_ptr + cache_offset)
    return keys, values


@triton.jit
def _exact_prefill_attention(
    query_ptr,  # [N, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    value_scale_ptr,  # as key_scale_ptr
    block_table_ptr,  # [S, max_blocks] int32; table_stride from slot to slot
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32
    sinks_ptr,  # [NUM_HEADS], storage type, or None
    output_ptr,  # [N, NUM_HEADS * HEAD_DIM], storage type
    scale,  # of scores, times log2(e)
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, padded
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, WIDE: see `Partitions`
    NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NUM_STAGES: tl.constexpr,  # of the pipeline over tiles
    NARROW_STAGES: tl.constexpr,  # of the pipeline over narrow partitions
    PDL: tl.constexpr,
):
    """Program (head, tile of rows), in the order of summation of online_softmax.py.

    Three kinds of partitions, in ascending order: narrow ones that all rows see, a loop whose pipeline spans
    the partitions; wide ones that all rows see; and those that reach to the diagonal or beyond. With a
    window, all partitions from the first row's first key on are of the last kind, and every tile is masked.

    Longer than other kernels: a loop for each kind, over sums that stay in registers.
    """
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    wait_for_producers(PDL)
    head = tl.program_id(0)
    tiles_ptr += tl.program_id(1) * NUM_FIELDS
    slot = tl.load(tiles_ptr)
    if slot < 0:
        return

    first_row = tl.load(tiles_ptr + 1).to(tl.int64)
    num_rows = tl.load(tiles_ptr + 2)
    start = tl.load(tiles_ptr + 3)
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    row_mask = (row < num_rows)[:, None] & (dim < PART_DIM)[None, :]
    query_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    query_ptrs = query_ptr + row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
    queries = load_parts(query_ptrs, row_mask, PART_DIM, NUM_PARTS)
    num_keys = start + num_rows
    # The first row's last key is the last that all rows see.
    diagonal = (start + 1) // TILE_KEYS * TILE_KEYS
    if WINDOW > 0:
        diagonal = start * 0
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    scale = head_scale(scale, key_scale_ptr, kv_head)
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)

    # With a window, `diagonal` is 0, and neither of these two loops runs.
    narrow_end = tl.minimum(diagonal, NARROW_END) // NARROW * NARROW
    for begin in tl.range(0, narrow_end, NARROW, num_stages=NARROW_STAGES):
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for tile in tl.static_range(NARROW // TILE_KEYS):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, begin + tile * TILE_KEYS, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, None, scale, False, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )

    wide_end = NARROW_END + tl.maximum(diagonal - NARROW_END, 0) // WIDE * WIDE
    for begin in range(NARROW_END, wide_end, WIDE):
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for first_key in tl.range(begin, begin + WIDE, TILE_KEYS, num_stages=NUM_STAGES):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, first_key, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, None, scale, False, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )

    begin = tl.where(narrow_end < NARROW_END, narrow_end, wide_end)
    first_tile = 0
    if WINDOW > 0:
        first_seen = tl.maximum(start - (WINDOW - 1), 0)
        first_tile = first_seen // TILE_KEYS * TILE_KEYS
        begin = partition_start(partition_of(first_seen, NARROW, NARROW_END, WIDE), NARROW, NARROW_END, WIDE)
    while begin < num_keys:
        end = tl.where(begin < NARROW_END, begin + NARROW, begin + WIDE)
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for first_key in tl.range(begin, tl.minimum(end, diagonal), TILE_KEYS, num_stages=NUM_STAGES):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, first_key, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, None, scale, False, IN_PAIRS
            )
        masked_end = tl.minimum(end, num_keys)
        masked_begin = tl.maximum(tl.maximum(begin, diagonal), first_tile)
        for first_key in tl.range(masked_begin, masked_end, TILE_KEYS, num_stages=1):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, first_key, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, True,
            )  # fmt: skip
            position = (first_key + tl.arange(0, TILE_KEYS))[None, :]
            is_seen = position <= (start + row)[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (position > (start + row)[:, None] - WINDOW)
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )
        begin = end

    sinks_rescale = tl.full((TILE_ROWS,), 1.0, tl.float32)
    if sinks_ptr is not None:
        sinks_rescale, weight = add_sink(maximum, weight, tl.load(sinks_ptr + head).to(tl.float32))
    start_dependents(PDL)
    output_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    output_ptrs = output_ptr + row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
    for part in tl.static_range(NUM_PARTS):
        result = total[part]
        if sinks_ptr is not None:
            result = result * sinks_rescale[:, None]
        if value_scale_ptr is not None:
            result = result * tl.load(value_scale_ptr + kv_head)
        # Every row that exists has seen a key; what is divided by here for the others is not stored.
        result = result / tl.where(row < num_rows, weight, 1.0)[:, None]
        tl.store(output_ptrs + part * PART_DIM, result.to(output_ptr.dtype.element_ty), mask=row_mask)


def exact_prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    output: Tensor,
    config: ExactPrefillConfig,
    partitions: Partitions,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Attention of the rows of `tiles` to the positions they see, in `output`.

    query, output: [N, num_heads, head_dim], of the storage type. keys, values, key_scale, value_scale: as of
    `paged_attention`. block_table: [S, max_blocks] int32.
    tiles: [num_tiles, 4] int32 as `prefill_tiles` fills it for config.tile_rows: (slot, or -1 for an unused
    tile; first row in query; number of rows; position of the first row). Row j of a tile sees positions
    0 ... position + j. Rows of no tile are left as they are.
    partitions: those of `paged_attention`, for equal bits.
    window: how many keys a row sees, its own being the last; 0: all. scale: of scores; None: 1 /
    sqrt(head_dim). sinks: [num_heads] in the storage type, a score each that takes its share of the softmax.
    All contiguous. Raises ValueError for another shape, type or layout.
    """
    num_rows, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    if num_heads % num_kv_heads or block_size & (block_size - 1):
        raise ValueError(
            f"num_heads={num_heads}, block_size={block_size}: "
            f"expected a multiple of num_kv_heads={num_kv_heads} and a power of two"
        )

    for name, rows in (("query", query), ("output", output)):
        check_tensor(name, rows, (num_rows, num_heads, head_dim), query.dtype)
    check_cache(keys, values, (num_blocks, num_kv_heads, block_size, head_dim), query.dtype)
    check_scales(keys, num_kv_heads, key_scale=key_scale, value_scale=value_scale)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    check_range("window", window, 0)
    check_tensors((num_heads,), query.dtype, sinks=sinks)
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    num_parts = 2 if keys.dtype == E4M3 else 1
    _exact_prefill_attention[(num_heads, tiles.shape[0])](
        query_ptr=query,
        keys_ptr=cache_words(keys),
        values_ptr=cache_words(values),
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        block_table_ptr=block_table,
        tiles_ptr=tiles,
        sinks_ptr=sinks,
        output_ptr=output,
        scale=(head_dim**-0.5 if scale is None else scale) * LOG2_E.value,
        table_stride=block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PARTS=num_parts,
        PADDED_DIM=max(triton.next_power_of_2(head_dim // num_parts), MIN_DOT_SIZE),
        IN_PAIRS=is_decoded_in_pairs(query.dtype),
        BLOCK_SIZE=block_size,
        TILE_ROWS=config.tile_rows,
        TILE_KEYS=partitions.tile,
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        WIDE=partitions.wide,
        WINDOW=window,
        NUM_STAGES=config.num_stages,
        NARROW_STAGES=config.narrow_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )
